"""Blocks on vLLM's cuts: the driver refuses the sizes that vLLM would refuse at load, and takes the others."""

import itertools
from types import SimpleNamespace

import pytest
import transformers

from tests.driver import refusal
from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.layers.shapes import split_layers
from verl_fp8.numerics.recipe import WHOLE
from verl_fp8.rules.tensor_parallel import check_tensor_parallel


def llama(**changes):
    """A Llama configuration of two layers, 4 query and 2 key heads of 64."""
    shape = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return transformers.LlamaConfig(**(shape | heads | changes))


def parallel(tp: int, block=(128, 128), exclude=(), **changes):
    """check_tensor_parallel on a Llama of these sizes."""
    config = llama(**changes)
    converted, _, shapes = split_layers(config, LayerFilter(exclude=exclude))
    check_tensor_parallel(config, shapes, converted, block, tp)


@pytest.mark.parametrize(
    ("tp", "changes"),
    [
        (1, {}),
        (2, {"head_dim": 128}),
        (4, {"head_dim": 128, "num_attention_heads": 8}),  # vLLM replicates the two key heads over four ranks
        (1, {"head_dim": 96, "num_key_value_heads": 4}),  # 384 rows each: whole blocks
        (1, {"hidden_size": 200}),  # ragged columns, and ragged rows of layers with one part
    ],
)
def test_sizes_that_vllm_takes_pass(tp, changes):
    """Whole blocks on every rank, and raggedness only where vLLM allows it."""
    parallel(tp, **changes)


@pytest.mark.parametrize(
    ("tp", "changes", "layer"),
    [
        (2, {}, "k_proj has out_features 128 / 2 = 64"),
        (2, {"head_dim": 128, "intermediate_size": 384}, "gate_proj has out_features 384 / 2 = 192"),
        (2, {"head_dim": 160, "exclude": ("*.[qkv]_proj",)}, "o_proj has in_features 640 / 2 = 320"),
        (1, {"num_key_value_heads": 1}, "k_proj has out_features 64"),
        (1, {"intermediate_size": 320}, "gate_proj has out_features 320"),
    ],
)
def test_sizes_that_vllm_refuses_are_refused_on_the_driver(tp, changes, layer):
    """The layer, its size on one rank, and the keys that resolve it."""
    with pytest.raises(ConfigError) as raised:
        parallel(tp, **changes)
    assert layer in raised.value.found
    assert ("tensor_model_parallel_size" in raised.value.fix) is (tp > 1)
    assert "fp8.recipe.weight_block" in raised.value.fix and "fp8.recipe.exclude" in raised.value.fix


def test_a_smaller_block_or_an_exclusion_resolves_it():
    """The two keys that the refusal offers do help."""
    parallel(2, block=(64, 64))
    parallel(2, exclude=("*.self_attn.*",))


@pytest.mark.parametrize("block", [(1, WHOLE), (WHOLE, WHOLE)], ids=["channel", "tensor"])
def test_whole_sides_fit_any_division(block):
    """A scale of a whole side asks for no multiple of anything: what blocks of 128 refuse passes."""
    with pytest.raises(ConfigError):
        parallel(2, (128, 128), intermediate_size=192)
    parallel(2, block, intermediate_size=192)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 64)], ids=str)
def test_the_driver_refuses_the_sizes_that_vllm_refuses(monkeypatch, tp, block):
    """vLLM's own rule on the arguments its layers give it, against ours on the driver, over many sizes of a Llama."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    # The rule asks for the rank count as a default, which needs a running group; the layer below carries its own.
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: tp)

    def vllm_refuses(sizes: list[int], in_: int, *, row: bool) -> bool:
        """``sizes``: rows of each part on one rank; ``in_``: columns on one rank."""
        layer = SimpleNamespace(tp_size=tp)
        total_in, total_out = (in_ * tp, sum(sizes)) if row else (in_, sum(sizes) * tp)
        try:
            fp8_utils.validate_fp8_block_shape(layer, total_in, total_out, in_, sizes, list(block))
        except ValueError:
            return True
        return False

    seen = set()
    for heads, kv_heads, dim, inner in itertools.product((4, 8), (1, 2, 4), (32, 64, 128, 192), (256, 384, 512, 640)):
        if inner % tp:
            continue
        size = {
            "hidden_size": 256,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
        }
        config = transformers.LlamaConfig(**size, head_dim=dim, num_hidden_layers=1, vocab_size=64)
        converted, _, shapes = split_layers(config, LayerFilter())
        kv = max(kv_heads // tp, 1) * dim
        theirs = (
            vllm_refuses([heads // tp * dim, kv, kv], 256, row=False)
            or vllm_refuses([256], heads * dim // tp, row=True)
            or vllm_refuses([inner // tp] * 2, 256, row=False)
            or vllm_refuses([256], inner // tp, row=True)
        )
        assert (refusal(check_tensor_parallel, config, shapes, converted, block, tp) is not None) is theirs, config
        seen.add(theirs)
    assert seen == {True, False}
