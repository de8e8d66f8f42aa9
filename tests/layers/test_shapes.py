"""A model's linear layers from its configuration: the same as the trainer finds."""

import pytest
import torch
import transformers

from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.layers.shapes import load_config, shapes_of_config, split_layers
from verl_fp8.numerics.recipe import Recipe
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
