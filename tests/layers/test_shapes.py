"""A model's linear layers from its configuration: the same as the trainer finds, and what tensor parallelism asks."""

import pytest
import torch
import transformers

from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.layers.shapes import load_config, shapes_of_config, split_layers
from verl_fp8.numerics.recipe import WHOLE, Recipe
from verl_fp8.rules.tensor_parallel import check_tensor_parallel
from verl_fp8.trainer.convert import convert_linears


def node(path, **changes) -> dict:
    """What ``actor_rollout_ref.rollout.fp8_model`` holds."""
    return {"path": str(path), "hf_config_path": None, "trust_remote_code": False, "override_config": {}} | changes


def llama(**changes):
    """A Llama configuration of two layers, 4 query and 2 key heads of 64."""
    shape = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return transformers.LlamaConfig(**(shape | heads | changes))


def meta_model(config):
    """The model itself, without memory."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_shapes_are_those_of_the_weights():
    """(out, in) of every nn.Linear by its name in the model, the head included."""
    shapes = shapes_of_config(llama(num_hidden_layers=1))
    prefix = "model.layers.0"
    assert shapes == {
        f"{prefix}.self_attn.q_proj": (256, 256),
        f"{prefix}.self_attn.k_proj": (128, 256),
        f"{prefix}.self_attn.v_proj": (128, 256),
        f"{prefix}.self_attn.o_proj": (256, 256),
        f"{prefix}.mlp.gate_proj": (512, 256),
        f"{prefix}.mlp.up_proj": (512, 256),
        f"{prefix}.mlp.down_proj": (256, 512),
        "lm_head": (64, 256),
    }


@pytest.mark.parametrize("exclude", [[], ["*.1.*"], ["*.self_attn.*"]], ids=["all", "a layer", "attention"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "llama"])
def test_the_driver_and_the_trainer_find_the_same_layers(make_model, arch, tied, exclude):
    """From the configuration (driver, vLLM's ignore list) and from the module itself (trainer): one list."""
    config = load_config(node(make_model(arch, tied)))
    layers = LayerFilter(exclude=exclude)
    report = convert_linears(meta_model(config), Recipe(), layers)
    converted, kept, shapes = split_layers(config, layers)
    assert converted == report.converted and set(kept) == set(report.skipped)
    assert set(shapes) == {*converted, *kept} and len(shapes) == report.total


def test_the_configuration_is_the_one_verl_builds_the_model_from(tiny_model, make_model):
    """hf_config_path before path, and override_config in both of verl's spellings."""
    assert load_config(node("/nowhere", hf_config_path=make_model("llama"))).model_type == "llama"
    for override in ({"num_hidden_layers": 1}, {"model_config": {"num_hidden_layers": 1}}):
        config = load_config(node(tiny_model, override_config=override | {"attn_implementation": "sdpa"}))
        assert config.num_hidden_layers == 1 and len(shapes_of_config(config)) == 8
    assert load_config(node(tiny_model)).num_hidden_layers == 2


def test_nothing_to_convert_is_an_error_with_the_reasons():
    """An FP8 run without an FP8 layer is a bf16 run."""
    with pytest.raises(ConfigError, match=r"none of the 15 .*\(excluded by '\*'\).*fp8.recipe.exclude"):
        split_layers(llama(), LayerFilter(exclude=("*",)))


def test_experts_of_another_layout_are_refused():
    """Biased, transposed, interleaved experts (GPT-OSS) are not what the trainer's and vLLM's FP8 experts compute."""
    with pytest.raises(ConfigError, match=r"GptOssExperts at model\.layers\.0\.mlp\.experts"):
        shapes_of_config(transformers.GptOssConfig(num_hidden_layers=1, num_local_experts=4))


def test_a_model_that_is_no_causal_lm_is_refused():
    """transformers' own ValueError names no key."""
    with pytest.raises(ConfigError, match=r"Qwen2_5_VLConfig.*text-only"):
        shapes_of_config(transformers.Qwen2_5_VLConfig())


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
