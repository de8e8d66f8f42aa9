"""Recipe, LayerFilter and the error types: all pure."""

import json
import pickle
import subprocess
import sys

import pytest

from verl_fp8.errors import ConfigError, ContractError, DataError, Fp8Error, SyncError
from verl_fp8.layers.filter import LayerFilter, digest_of_layers, fused_group
from verl_fp8.numerics.recipe import WHOLE, Recipe

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def dense(layers=2):
    """Names and shapes of the linear layers of a small Llama-like model."""
    names = [f"model.layers.{i}.self_attn.{p}" for i in range(layers) for p in ATTENTION]
    names += [f"model.layers.{i}.mlp.{p}" for i in range(layers) for p in MLP]
    return {name: (128, 256) for name in [*names, "lm_head"]}


@pytest.mark.parametrize("kind", [Fp8Error, ConfigError, DataError, ContractError, SyncError])
def test_errors_survive_pickling(kind):
    """Ray pickles exceptions between processes; the sentence and its three parts must come through."""
    error = pickle.loads(pickle.dumps(kind("an apple", "a pear", "swap them")))
    assert type(error) is kind
    assert (error.asked, error.found, error.fix) == ("an apple", "a pear", "swap them")
    assert str(error) == "asked: an apple; found: a pear; fix: swap them"


def test_errors_are_also_builtin_ones():
    """verl and Hydra catch ValueError and RuntimeError."""
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DataError, ValueError)
    assert issubclass(ContractError, RuntimeError)
    assert issubclass(SyncError, RuntimeError)


def test_recipe_imports_no_torch():
    """The driver and the Hydra plug-in use recipes without paying for torch."""
    code = "import sys, verl_fp8.numerics.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_blocks_from_yaml_become_tuples():
    """Hydra hands lists over; equal recipes must be equal and hashable."""
    recipe = Recipe(weight_block=[64, 64], activation_block=[1, 64], gradient_block=[1, 64], eps=0)
    assert recipe.weight_block == (64, 64)
    assert hash(recipe) == hash(Recipe((64, 64), (1, 64), (1, 64)))


def test_blocks_from_omegaconf():
    """OmegaConf's ListConfig is a sequence but not a list."""
    omegaconf = pytest.importorskip("omegaconf")
    assert Recipe(weight_block=omegaconf.OmegaConf.create([128, 128])) == Recipe()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_block", [128]),
        ("weight_block", [128, 0]),
        ("weight_block", [128, 128.0]),
        ("weight_block", [True, 128]),
        ("weight_block", "128,128"),
        ("weight_block", 128),
        ("weight_block", None),
        ("activation_block", [2, 128]),
        ("activation_block", [1, 64]),
        ("gradient_block", [128, 128]),
        ("gradient_block", [1, 64]),
        ("scale_format", "auto"),
        ("scale_format", None),
        ("backward", "bf16"),
        ("backward", ["fp8"]),
        ("fmt", "e5m2"),
        ("eps", -1e-9),
        ("eps", "0"),
        ("eps", True),
        ("eps", float("nan")),
        ("eps", float("inf")),
    ],
)
def test_a_bad_value_names_its_key(key, value):
    """Every wrong switch dies with the key that is wrong."""
    with pytest.raises(ConfigError, match=rf"fp8\.recipe\.{key}="):
        Recipe(**{key: value})


def test_from_dict_refuses_unknown_keys():
    """A typo must not train with the default."""
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.weight_blok="):
        Recipe.from_dict({"weight_blok": [128, 128]})


def test_recipe_round_trips_through_json():
    """The handshake sends recipes as JSON."""
    recipe = Recipe(scale_format="pow2", backward="dequantized", eps=1e-12)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert json.loads(recipe.canonical()) == recipe.to_dict()


def test_digest_is_frozen():
    """The digest is compared between processes and across versions: it may change only with the meaning."""
    assert Recipe().canonical() == (
        '{"activation_block":[1,128],"backward":"fp8","eps":0.0,"fmt":"e4m3","gradient_block":[1,128],'
        '"scale_format":"fp32","weight_block":[128,128]}'
    )
    assert Recipe().digest() == "8e61dbd989d8aa9b"


def test_digest_tells_every_field_apart():
    """Two recipes that differ in one field have different digests."""
    variants = [
        Recipe(),
        Recipe((64, 128)),
        Recipe((64, 64), (1, 64), (1, 64)),
        Recipe(scale_format="pow2"),
        Recipe(eps=1e-10),
        Recipe(backward="high_precision"),
        Recipe(backward="dequantized"),
    ]
    assert len({r.digest() for r in variants}) == len(variants)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lm_head", "output head"),
        ("embed_out", "output head"),
        ("score", "output head"),
        ("v_head.summary", "output head"),
        ("model.layers.0.mlp.gate", "MoE router"),
        ("model.layers.0.mlp.router", "MoE router"),
        ("model.layers.0.block_sparse_moe.router.layer", "MoE router"),
        ("model.layers.0.mlp.shared_expert_gate", "MoE router"),
        ("visual.blocks.0.attn.proj", "vision or audio tower"),
        ("model.visual.blocks.0.attn.qkv", "vision or audio tower"),
        ("model.vision_tower.encoder.layers.0.mlp.fc1", "vision or audio tower"),
        ("model.layers.0.mlp.gate_proj", None),
        ("model.layers.0.mlp.gate_up_proj", None),
        ("model.layers.0.mlp.shared_expert.gate_proj", None),
        ("model.layers.0.mlp.experts.3.down_proj", None),
        ("model.language_model.layers.0.self_attn.q_proj", None),
        ("model.visual_adapter.proj", None),
        ("model.lm_head_norm.proj", None),
    ],
)
def test_default_rules(name, reason):
    """Names are matched by whole components: substrings are how verl #7519 hit gate_up_proj."""
    assert LayerFilter().reason(name, (128, 128)) == reason


def test_reason_knows_the_backends_shapes():
    """A dimension that the backend's kernels cannot take is a reason; the reference takes any."""
    layer_filter = LayerFilter()
    assert layer_filter.reason("a.o_proj", (24, 40)) is None
    assert layer_filter.reason("a.o_proj", (24, 40), multiple=(8, 16)) == "in_features not a multiple of 16"
    assert layer_filter.reason("a.o_proj", (20, 48), multiple=(8, 16)) == "out_features not a multiple of 8"
    assert layer_filter.reason("a.o_proj", (0, 48)) == "empty weight"


def test_split_keeps_order_and_reasons():
    """Everything but the head is converted, in model order."""
    layers = dense()
    converted, skipped = LayerFilter().split(layers)
    assert converted == tuple(n for n in layers if n != "lm_head")
    assert skipped == {"lm_head": "output head"}
    assert LayerFilter().split(layers.items()) == (converted, skipped)


def test_exclude_patterns():
    """A pattern is matched against the whole name, case sensitively."""
    layer_filter = LayerFilter(exclude=["model.layers.1.*", "*.down_proj"])
    converted, skipped = layer_filter.split(dense())
    assert "model.layers.0.self_attn.q_proj" in converted
    assert skipped["model.layers.1.self_attn.q_proj"] == "excluded by 'model.layers.1.*'"
    assert skipped["model.layers.0.mlp.down_proj"] == "excluded by '*.down_proj'"
    assert layer_filter.unmatched(["model.layers.1.x", "Q.DOWN_PROJ"]) == ("*.down_proj",)


def test_a_pattern_without_a_layer_is_an_error():
    """A typo in exclude would silently quantise the layer."""
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.exclude"):
        LayerFilter(exclude=("model.layer.0.*",)).split(dense())


@pytest.mark.parametrize("bad", ["model.layers.0.*", None, [""], [3], {"a"}])
def test_exclude_must_be_a_list_of_patterns(bad):
    """A bare string would be read as a list of letters."""
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.exclude="):
        LayerFilter(exclude=bad)


@pytest.mark.parametrize("pattern", ["*.q_proj", "*.0.mlp.up_proj", "*layers.1.self_attn.[qk]_proj"])
def test_exclude_may_not_split_a_fused_layer(pattern):
    """vLLM runs q/k/v and gate/up as one layer each, with one precision."""
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.exclude") as info:
        LayerFilter(exclude=(pattern,)).split(dense())
    assert pattern in str(info.value)


def test_excluding_a_whole_fused_layer_is_fine():
    """All shards or none."""
    _, skipped = LayerFilter(exclude=("*.[qkv]_proj",)).split(dense(1))
    assert {n.rpartition(".")[2] for n in skipped} == {"q_proj", "k_proj", "v_proj", "lm_head"}


def test_a_shape_may_not_split_a_fused_layer_either():
    """k_proj too narrow for the backend while q_proj fits: the user must decide."""
    layers = dense(1) | {"model.layers.0.self_attn.k_proj": (20, 256)}
    with pytest.raises(ConfigError, match="qkv_proj"):
        LayerFilter().split(layers, multiple=(16, 16))


def test_reasons_from_outside_count():
    """A layer the caller cannot convert is kept with the caller's reason, and may not split a fused layer."""
    converted, skipped = LayerFilter().split(dense(1), kept={"model.layers.0.self_attn.o_proj": "quantised already"})
    assert skipped["model.layers.0.self_attn.o_proj"] == "quantised already"
    assert "model.layers.0.self_attn.o_proj" not in converted
    with pytest.raises(ConfigError, match="gate_up_proj"):
        LayerFilter().split(dense(1), kept={"model.layers.0.mlp.up_proj": "quantised already"})


def test_experts_of_a_layer_are_one_group():
    """vLLM's FusedMoE holds all experts of a layer in one tensor."""
    layers = {f"model.layers.0.mlp.experts.{i}.{p}": (128, 128) for i in range(3) for p in MLP}
    assert {fused_group(n) for n in layers} == {"model.layers.0.mlp.experts"}
    assert len(LayerFilter().split(layers)[0]) == 9
    with pytest.raises(ConfigError, match="experts"):
        LayerFilter(exclude=("*.experts.1.*",)).split(layers)


def test_digest_of_layers_ignores_order():
    """Trainer and vLLM enumerate layers differently."""
    assert digest_of_layers(["b", "a"]) == digest_of_layers(("a", "b"))
    assert digest_of_layers(["a", "b"]) != digest_of_layers(["ab"])
    assert len(digest_of_layers([])) == 16


@pytest.mark.parametrize(
    ("weight", "activation", "names", "shown"),
    [
        ((128, 128), (1, 128), ("block", "group"), "weights 128x128, activations 1x128"),
        ((1, WHOLE), (1, WHOLE), ("channel", "token"), "weights per channel, activations per token"),
        ((1, WHOLE), (WHOLE, WHOLE), ("channel", "tensor"), "weights per channel, activations per tensor"),
        ((WHOLE, WHOLE), (1, WHOLE), ("tensor", "token"), "weights per tensor, activations per token"),
        ((WHOLE, WHOLE), (WHOLE, WHOLE), ("tensor", "tensor"), "weights per tensor, activations per tensor"),
    ],
)
def test_granularity_has_a_name(weight, activation, names, shown):
    """What shares a scale is read off the blocks, for people and for the rollout, and survives JSON."""
    recipe = Recipe(weight, activation, (1, weight[1]))
    assert (recipe.weights, recipe.activations) == names and recipe.granularity == shown
    assert Recipe.from_dict(json.loads(recipe.canonical())) == recipe


@pytest.mark.parametrize(
    ("weight", "activation"),
    [
        ((WHOLE, 128), (1, 128)),
        ((128, WHOLE), (1, WHOLE)),
        ((128, 128), (1, WHOLE)),
        ((1, WHOLE), (1, 128)),
        ((WHOLE, WHOLE), (WHOLE, 1)),
    ],
)
def test_scales_over_different_stretches_are_refused(weight, activation):
    """A GEMM takes one scale of each operand for the same stretch of the contracted dimension."""
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.(weight|activation)_block"):
        Recipe(weight, activation, (1, weight[1]))
