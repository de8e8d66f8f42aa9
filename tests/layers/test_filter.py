"""LayerFilter: which names and shapes are converted, why the others stay, and what vLLM fuses; all pure."""

import pytest

from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import LayerFilter, digest_of_layers, fused_group

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def dense(layers=2):
    """Names and shapes of the linear layers of a small Llama-like model."""
    names = [f"model.layers.{i}.self_attn.{p}" for i in range(layers) for p in ATTENTION]
    names += [f"model.layers.{i}.mlp.{p}" for i in range(layers) for p in MLP]
    return {name: (128, 256) for name in [*names, "lm_head"]}


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
