"""How a matrix is quantised: :class:`Recipe`, the arithmetic of one FP8 run.

Frozen and pure: no torch, no verl, no vLLM. The trainer's layers, vLLM's kernels and the weight sync all derive from
this object, so that there is one owner of the question. Its digest is compared between trainer and rollout.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
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


@dataclass(frozen=True)
class Recipe:
    """The arithmetic of one FP8 run; see the numerics contract in :mod:`verl_fp8.numerics.quantize`.

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
            raise bad_key("weight_block", self.weight_block, "give two positive integers, e.g. [128, 128]")
        columns = self.weight_block[1]
        whole = ((WHOLE, WHOLE),) if columns == WHOLE else ()
        for key, more in (("activation_block", whole), ("gradient_block", ())):
            if getattr(self, key) not in ((1, columns), *more):
                # One scale of each operand must cover the same stretch of the contracted dimension, as in
                # DeepGEMM, cuBLASLt and vLLM's GEMMs; blocks over several tokens would mix samples.
                raise bad_key(
                    key, getattr(self, key), f"set it to [1, {columns}], the columns of fp8.recipe.weight_block"
                )
        for key, allowed in (("scale_format", SCALE_FORMATS), ("backward", BACKWARDS), ("fmt", FORMATS)):
            value = getattr(self, key)
            if not isinstance(value, str) or value not in allowed:
                raise bad_key(key, value, f"set it to one of {', '.join(allowed)}")
        number = isinstance(self.eps, int | float) and not isinstance(self.eps, bool)
        if not number or not math.isfinite(self.eps) or self.eps < 0:
            raise bad_key("eps", self.eps, "set it to a finite number >= 0 (0.0 is TransformerEngine's)")
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
                raise bad_key(key, values[key], f"use one of {', '.join(known)}")
        return cls(**values)

    def canonical(self) -> str:
        """Stable JSON of every field: equal strings mean equal arithmetic."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of :meth:`canonical`; what trainer and rollout log and compare."""
        return digest_of(self.canonical())


def _granularity(names: Mapping[str, tuple[int, int] | None], block: tuple[int, int]) -> str:
    default = next(name for name, shared in names.items() if shared is None)
    return next((name for name, shared in names.items() if shared == block), default)


def _block(key: str, value: object) -> tuple[int, int]:
    # OmegaConf's ListConfig is a Sequence but not a list.
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not listed or len(value) != 2 or not all(type(v) is int and (v > 0 or v == WHOLE) for v in value):
        raise bad_key(key, value, "give two positive integers, e.g. [128, 128]")
    return tuple(value)


def bad_key(key: str, value: object, fix: str) -> ConfigError:
    return ConfigError(asked=f"fp8.recipe.{key}={value!r}", found="not a value it can take", fix=fix)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# What the GPU kernels of both sides take: DeepGEMM, cuBLASLt and vLLM's CUTLASS block GEMM know no other block.
GPU_BLOCK = (128, 128)


def scales_over(size: int, unit: int) -> int:
    """How many scales cover ``size`` values of one side in blocks of ``unit``."""
    return 1 if unit == WHOLE else -(-size // unit)
