"""Per-tensor and per-channel scales in vLLM's own linear layers: what a sync loads into each rank, and what it
computes."""

import pytest
import torch

from verl_fp8.numerics.linear import fp8_linear_forward
from verl_fp8.numerics.quantize import QuantizedTensor, quantize
from verl_fp8.rollout.arguments import METHOD
from verl_fp8.rollout.worker import fp8_modules, loaded_shard
from verl_fp8.switches.settings import NODE, Fp8Settings
from verl_fp8.sync.stream import SCALE_SUFFIX, WEIGHT_SUFFIX, outgoing

HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 64, 96, 4, 1, 16
# Name -> (out, in); each with weights of another magnitude, so that no two have one scale.
SHAPES = {
    "q_proj": (HEADS * HEAD, HIDDEN), "k_proj": (KV_HEADS * HEAD, HIDDEN), "v_proj": (KV_HEADS * HEAD, HIDDEN),
    "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER),
}  # fmt: skip
# vLLM's layer -> its parts, and the names vLLM loads them by.
PARTS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "down_proj": ["down_proj"],
}
SHARDS = {"q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "gate_proj": (0,), "up_proj": (1,), "down_proj": ()}


def node(weights, activations):
    """The fp8 node of a rollout."""
    return {"mode": "rollout", "recipe": {"weights": weights, "activations": activations}}


@pytest.fixture
def layers(monkeypatch):
    """layers(node, rank, ranks) -> vLLM's three kinds of linear layers as this rank builds them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    from verl_fp8.rollout import linear_cpu

    linear_cpu.install_linear_cpu()

    def build(fp8, rank, ranks):
        for module in (parameter, linear):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
        quant = get_quantization_config(METHOD).from_config({"ignored_layers": ["lm_head"]})
        quant.packed_modules_mapping = {prefix: names for prefix, names in PARTS.items() if len(names) > 1}
        common = {"bias": False, "quant_config": quant, "params_dtype": torch.bfloat16}
        # vLLM's model loader sets the default dtype to the model's.
        with (
            set_current_vllm_config(VllmConfig(additional_config={NODE: fp8})),
            set_default_torch_dtype(torch.bfloat16),
        ):
            qkv = linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, prefix="qkv_proj", **common)
            gate_up = linear.MergedColumnParallelLinear(HIDDEN, [INNER] * 2, prefix="gate_up_proj", **common)
            down = linear.RowParallelLinear(INNER, HIDDEN, prefix="down_proj", reduce_results=False, **common)
        return torch.nn.ModuleDict({"qkv_proj": qkv, "gate_up_proj": gate_up, "down_proj": down})

    return build


def rows(weight, rank, ranks, name):
    """A rank's part: rows of the column-parallel layers, columns of the row-parallel one; key heads are repeated."""
    if name == "down_proj":
        return weight.chunk(ranks, dim=1)[rank]
    return weight if name in ("k_proj", "v_proj") else weight.chunk(ranks)[rank]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("activations", ["token", "tensor"])
@pytest.mark.parametrize("weights", ["channel", "tensor"])
def test_each_rank_holds_and_computes_with_its_part(layers, weights, activations, ranks):
    """Every part of a fused layer keeps its own scales; codes, scales and products are the quantiser's to the bit."""
    fp8 = node(weights, activations)
    settings = Fp8Settings.parse(fp8, capability=None)
    torch.manual_seed(0)
    full = {name: torch.randn(shape) * 10.0**-i for i, (name, shape) in enumerate(SHAPES.items())}
    stream = dict(outgoing(((n + WEIGHT_SUFFIX, w) for n, w in full.items()), settings, full))
    scales = {name: stream[name + SCALE_SUFFIX].shape for name in full}
    assert scales == {name: (1 if weights == "tensor" else out, 1) for name, (out, _) in SHAPES.items()}
    x = {HIDDEN: torch.randn(5, HIDDEN, dtype=torch.bfloat16), INNER: torch.randn(5, INNER, dtype=torch.bfloat16)}
    for rank in range(ranks):
        modules = layers(fp8, rank, ranks)
        assert set(fp8_modules(modules)) == set(modules)
        for prefix, names in PARTS.items():
            module = modules[prefix]
            for index, name in enumerate(names):
                for suffix in (WEIGHT_SUFFIX, SCALE_SUFFIX):
                    parameter = getattr(module, suffix[1:])
                    sent, widths = stream[name + suffix], module.logical_widths
                    parameter.weight_loader(parameter, sent, *SHARDS[name])
                    unit = (1, 1) if suffix == WEIGHT_SUFFIX else tuple(module.weight_block_size)
                    held, expected = loaded_shard(parameter.data, sent, widths, index, unit, (rank, ranks))
                    assert torch.equal(held.view(torch.uint8), expected.contiguous().view(torch.uint8)), (name, suffix)
            given = x[HIDDEN] if prefix != "down_proj" else x[INNER].chunk(ranks, dim=1)[rank].contiguous()
            found = module.quant_method.apply(module, given)
            expected = []
            for name in names:
                of_all = quantize(full[name].bfloat16(), settings.recipe.weight_block)
                codes, scale = rows(of_all.data, rank, ranks, name), of_all.scale_inv
                if weights == "channel" and name != "down_proj":
                    scale = rows(scale, rank, ranks, name)
                part = QuantizedTensor(codes.contiguous(), scale, of_all.block)
                expected.append(fp8_linear_forward(given, part, settings.recipe))
            assert torch.equal(found, torch.cat(expected, dim=1)), (prefix, rank)


def test_vllm_takes_the_method_from_the_models_configuration(tiny_model):
    """verl passes ``quantization=fp8`` on; vLLM's configuration then names our method and exactly the kept layers."""
    from vllm.engine.arg_utils import EngineArgs

    from verl_fp8.rollout import linear_cpu
    from verl_fp8.rollout.arguments import fp8_arguments

    linear_cpu.install_linear_cpu()
    kwargs = fp8_arguments(node("tensor", "tensor"), {"path": tiny_model}, {})
    del kwargs["worker_extension_cls"]
    config = EngineArgs(
        model=tiny_model, quantization="fp8", dtype="bfloat16", enforce_eager=True, max_model_len=64,
        enable_sleep_mode=False, kv_cache_memory_bytes=1 << 26, **kwargs,
    ).create_engine_config()  # fmt: skip
    assert (config.model_config.quantization, config.quant_config.get_name()) == (METHOD, METHOD)
    assert config.quant_config.ignored_layers == ["lm_head"]
