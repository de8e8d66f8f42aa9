"""Which linear layers become FP8: :class:`LayerFilter`, from names and shapes. How it works in ten lines:

1. The trainer and vLLM each build the model in their own way. If they disagree about one layer, one side computes it in
   FP8 and the other in bf16, and nobody is told. So both ask one filter, and so does the weight sync.
2. The filter is frozen and pure: no torch, no verl, no vLLM. It sees a checkpoint's names and shapes, (out, in).
3. :meth:`LayerFilter.reason` judges one layer. It gives the reason why the layer stays in bf16, or None.
4. Output heads, routers and vision or audio towers stay in bf16, and so does what ``fp8.recipe.exclude`` matches.
5. Parts of a name are compared whole. As a substring, the router ``gate`` would also hit ``gate_up_proj``.
6. :meth:`LayerFilter.split` judges a model: (the converted names, kept name -> reason), in the model's order.
7. vLLM builds q, k and v as one layer, gate and up as one, and all experts of a layer as one: :func:`fused_group`.
8. Such a layer has one precision. What surprises: excluding ``*.q_proj`` alone is therefore an error.
9. A pattern that matches no layer is an error too. A typo would convert the layer that was meant to stay.
10. :func:`digest_of_layers` names the result, so that the two sides can compare it in sixteen letters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

from verl_fp8.errors import ConfigError
from verl_fp8.numerics.recipe import bad_key, digest_of

# vLLM builds one linear out of these (vllm/model_executor/models/*.py, `packed_modules_mapping`; DeepSeek's
# fused_qkv_a_proj), and refuses a fused layer of which only some shards are quantised (quant_utils.py,
# is_layer_skipped).
FUSED_SHARDS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_FUSED_OF = {shard: fused for fused, shards in FUSED_SHARDS.items() for shard in shards}

# Matched against whole components of the name, never as substrings: `mlp.gate` as a substring also hits
# `mlp.gate_up_proj` (verl issue #7519).
_HEADS = frozenset({"lm_head", "embed_out", "score", "classifier", "v_head", "value_head"})
_ROUTER_LEAVES = frozenset({"gate", "router", "shared_expert_gate"})
_TOWERS = frozenset({"visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector"})


@dataclass(frozen=True)
class LayerFilter:
    """Which linear layers become FP8: fully qualified name and shape -> convert, or the reason why not.

    Output heads, MoE router gates and vision or audio towers stay in high precision.

    Attributes:
        exclude: shell patterns (``fnmatch``, case sensitive) on the fully qualified name, e.g. ``model.layers.0.*``.
            Each must match at least one layer.

    Raises:
        ConfigError: ``exclude`` is not a list of non-empty strings.
    """

    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        patterns = self.exclude
        listed = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not listed or not all(isinstance(p, str) and p for p in patterns):
            raise bad_key("exclude", patterns, "give a list of name patterns, e.g. ['model.layers.0.*']")
        object.__setattr__(self, "exclude", tuple(patterns))

    def reason(self, name: str, shape: tuple[int, int], *, multiple: tuple[int, int] = (1, 1)) -> str | None:
        """Why the layer stays in high precision, or None if it is converted.

        Args:
            name: fully qualified module name, e.g. ``model.layers.0.mlp.gate_proj``.
            shape: of its weight, (out, in).
            multiple: what the backend's kernels need (out, in) to be multiples of; TransformerEngine's FP8 GEMM needs
                16 of the contracted dimension (transformer_engine/pytorch/utils.py, assert_dim_for_fp8_exec).
        """
        for pattern in self.exclude:
            if fnmatchcase(name, pattern):
                return f"excluded by {pattern!r}"
        components = name.split(".")
        if not _TOWERS.isdisjoint(components):
            return "vision or audio tower"
        if not _HEADS.isdisjoint(components):
            return "output head"
        if is_router(name):
            return "MoE router"
        if 0 in shape:
            return "empty weight"
        for what, size, unit in zip(("out", "in"), shape, multiple, strict=True):
            if size % unit:
                return f"{what}_features not a multiple of {unit}"
        return None

    def unmatched(self, names: Iterable[str]) -> tuple[str, ...]:
        """The ``exclude`` patterns that match none of ``names``, in the order given."""
        names = tuple(names)
        return tuple(p for p in self.exclude if not any(fnmatchcase(n, p) for n in names))

    def split(
        self,
        names_and_shapes: Mapping[str, tuple[int, int]] | Iterable[tuple[str, tuple[int, int]]],
        *,
        multiple: tuple[int, int] = (1, 1),
        kept: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Divide a model's linear layers into those converted and those kept.

        Args:
            names_and_shapes: fully qualified name -> (out, in) of every linear layer, as a mapping or as pairs.
            multiple: see :meth:`reason`.
            kept: name -> reason for layers that the caller cannot convert whatever their name.

        Returns:
            The names converted, in the order given, and a dict of name -> reason for the rest.

        Raises:
            ConfigError: a pattern of ``exclude`` matches no layer, or layers that vLLM fuses into one would be split.
        """
        layers = dict(names_and_shapes)
        if unmatched := self.unmatched(layers):
            raise ConfigError(
                asked=f"keep the layers {list(unmatched)} in high precision (fp8.recipe.exclude)",
                found=f"no linear layer with such a name among {len(layers)}, e.g. {list(layers)[:3]}",
                fix="correct or remove the pattern in fp8.recipe.exclude",
            )
        reasons = {n: self.reason(n, tuple(shape), multiple=multiple) or kept.get(n) for n, shape in layers.items()}
        _refuse_split_groups(reasons)
        return (
            tuple(name for name, reason in reasons.items() if reason is None),
            {name: reason for name, reason in reasons.items() if reason is not None},
        )


def is_router(name: str) -> bool:
    """Whether a layer of this name is a MoE router gate or the gate of a shared expert."""
    components = name.split(".")
    return components[-1] in _ROUTER_LEAVES or "router" in components


def digest_of_layers(converted: Iterable[str]) -> str:
    """First 16 hex digits of the SHA-256 of the sorted layer names; independent of the order given."""
    return digest_of("\n".join(sorted(converted)))


def fused_group(name: str) -> str | None:
    """The name of the vLLM layer that ``name`` is one shard of, or None.

    ``a.self_attn.k_proj`` -> ``a.self_attn.qkv_proj``; every layer under ``a.mlp.experts.`` -> ``a.mlp.experts``, since
    vLLM's FusedMoE holds all experts of a layer in one tensor.
    """
    prefix, found, _ = name.partition(".experts.")
    if found:
        return f"{prefix}.experts"
    parent, _, leaf = name.rpartition(".")
    fused = _FUSED_OF.get(leaf)
    if fused is None:
        return None
    return f"{parent}.{fused}" if parent else fused


def _refuse_split_groups(reasons: Mapping[str, str | None]) -> None:
    groups: dict[str, list[str]] = {}
    for name in reasons:
        if group := fused_group(name):
            groups.setdefault(group, []).append(name)
    for group, names in groups.items():
        kept = [n for n in names if reasons[n] is not None]
        if kept and len(kept) < len(names):
            others = [n for n in names if reasons[n] is None]
            raise ConfigError(
                asked=f"keep {kept[0]} in high precision ({reasons[kept[0]]}) and convert {others[0]} to FP8",
                found=f"vLLM runs both as one layer, {group}, which has one precision",
                fix=f"let fp8.recipe.exclude match all of {sorted(names)[:8]} or none of them",
            )
