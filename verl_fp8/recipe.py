"""What is quantised and how: :class:`Recipe` (the arithmetic) and :class:`LayerFilter` (the list of layers).

Both are frozen and pure: no torch, no verl, no vLLM. The trainer's swap, vLLM's ignore list and the weight sync all
derive from these two objects, so that there is one owner of each question. Their digests are compared between trainer
and rollout.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from types import MappingProxyType

from verl_fp8.errors import ConfigError

SCALE_FORMATS = ("fp32", "pow2")
BACKWARDS = ("fp8", "high_precision", "dequantized")
FORMATS = ("e4m3",)

# In a block: the whole side of the matrix, as in vLLM's GroupShape (quantization/utils/quant_utils.py).
WHOLE = -1
# fp8.recipe.weights and fp8.recipe.activations -> the values that share a scale; None: fp8.recipe.weight_block says.
WEIGHTS = MappingProxyType({"block": None, "channel": (1, WHOLE), "tensor": (WHOLE, WHOLE)})
ACTIVATIONS = MappingProxyType({"group": None, "token": (1, WHOLE), "tensor": (WHOLE, WHOLE)})

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
class Recipe:
    """The arithmetic of one FP8 run; see the numerics contract in :mod:`verl_fp8.numerics`.

    Attributes:
        weight_block: (rows, columns) of a weight [out, in] that share a scale; (1, WHOLE) is one scale an output
            channel, (WHOLE, WHOLE) one a tensor.
        activation_block: (1, n): n values along the contracted dimension of an activation share a scale; with weights
            whole along it (1, WHOLE), one scale a token, or (WHOLE, WHOLE), one for all tokens of a forward pass.
        gradient_block: (1, n), the same for output gradients.
        scale_format: ``fp32`` (s = 448 / amax) or ``pow2`` (the same with the mantissa cleared).
        eps: floor on amax before the division; 0.0 is TransformerEngine's default (recipe.Float8BlockScaling).
        backward: operands of the two backward GEMMs. ``fp8`` is TransformerEngine's default, the other two are its
            ``backward_override`` values (transformer_engine/common/recipe/__init__.py, Float8BlockScaling):
            ``high_precision`` keeps the original operands, ``dequantized`` dequantises the forward's operands to the
            activation dtype; in both the gradient is not quantised.
        fmt: the 8-bit format; ``e4m3`` only.

    Raises:
        ConfigError: a value is not one of those; the message names ``fp8.recipe.<key>``.
    """

    weight_block: tuple[int, int] = (128, 128)
    activation_block: tuple[int, int] = (1, 128)
    gradient_block: tuple[int, int] = (1, 128)
    scale_format: str = "fp32"
    eps: float = 0.0
    backward: str = "fp8"
    fmt: str = "e4m3"

    def __post_init__(self) -> None:
        for key in ("weight_block", "activation_block", "gradient_block"):
            object.__setattr__(self, key, _block(key, getattr(self, key)))
        if WHOLE in self.weight_block and self.weight_block not in WEIGHTS.values():
            raise _bad("weight_block", self.weight_block, "give two positive integers, e.g. [128, 128]")
        columns = self.weight_block[1]
        whole = ((WHOLE, WHOLE),) if columns == WHOLE else ()
        for key, more in (("activation_block", whole), ("gradient_block", ())):
            if getattr(self, key) not in ((1, columns), *more):
                # One scale of each operand must cover the same stretch of the contracted dimension, as in
                # DeepGEMM, cuBLASLt and vLLM's GEMMs; blocks over several tokens would mix samples.
                raise _bad(key, getattr(self, key), f"set it to [1, {columns}], the columns of fp8.recipe.weight_block")
        for key, allowed in (("scale_format", SCALE_FORMATS), ("backward", BACKWARDS), ("fmt", FORMATS)):
            value = getattr(self, key)
            if not isinstance(value, str) or value not in allowed:
                raise _bad(key, value, f"set it to one of {', '.join(allowed)}")
        number = isinstance(self.eps, int | float) and not isinstance(self.eps, bool)
        if not number or not math.isfinite(self.eps) or self.eps < 0:
            raise _bad("eps", self.eps, "set it to a finite number >= 0 (0.0 is TransformerEngine's)")
        object.__setattr__(self, "eps", float(self.eps))

    @property
    def weights(self) -> str:
        """``block``, ``channel`` or ``tensor``: what shares a scale."""
        return _granularity(WEIGHTS, self.weight_block)

    @property
    def activations(self) -> str:
        """``group``, ``token`` or ``tensor``: what shares a scale."""
        return _granularity(ACTIVATIONS, self.activation_block)

    @property
    def granularity(self) -> str:
        """For people: ``weights 128x128, activations 1x128``, ``weights per tensor, activations per token``."""

        def shown(name: str, block: tuple[int, int]) -> str:
            return f"per {name}" if WHOLE in block else f"{block[0]}x{block[1]}"

        weights, activations = shown(self.weights, self.weight_block), shown(self.activations, self.activation_block)
        return f"weights {weights}, activations {activations}"

    def to_dict(self) -> dict:
        """Plain values only (blocks as lists), so that it survives JSON, YAML and Hydra unchanged."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping) -> "Recipe":
        """The inverse of :meth:`to_dict`; absent keys take their defaults.

        Raises:
            ConfigError: an unknown key (a typo must not train with the default), or a bad value.
        """
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise _bad(key, values[key], f"use one of {', '.join(known)}")
        return cls(**values)

    def canonical(self) -> str:
        """Stable JSON of every field: equal strings mean equal arithmetic."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of :meth:`canonical`; what trainer and rollout log and compare."""
        return _digest(self.canonical())


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
            raise _bad("exclude", patterns, "give a list of name patterns, e.g. ['model.layers.0.*']")
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
    return _digest("\n".join(sorted(converted)))


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


def _granularity(names: Mapping[str, tuple[int, int] | None], block: tuple[int, int]) -> str:
    default = next(name for name, shared in names.items() if shared is None)
    return next((name for name, shared in names.items() if shared == block), default)


def _block(key: str, value: object) -> tuple[int, int]:
    # OmegaConf's ListConfig is a Sequence but not a list.
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not listed or len(value) != 2 or not all(type(v) is int and (v > 0 or v == WHOLE) for v in value):
        raise _bad(key, value, "give two positive integers, e.g. [128, 128]")
    return tuple(value)


def _bad(key: str, value: object, fix: str) -> ConfigError:
    return ConfigError(asked=f"fp8.recipe.{key}={value!r}", found="not a value it can take", fix=fix)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
