"""The two user-facing groups as values: ``fp8`` -> :class:`Fp8Settings`, ``is_correction`` -> :class:`CorrectionSettings`.

Pure: no torch, no verl. Every process parses the same configuration nodes with the same code; an unknown key or a wrong type
raises and names the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl_fp8.errors import ConfigError
from verl_fp8.recipe import LayerFilter, Recipe

MODES = ("unified", "rollout")
BACKENDS = ("auto", "reference")
WEIGHT_SYNCS = ("codes", "bf16")
METHODS = ("ais", "none")


@dataclass(frozen=True)
class Fp8Settings:
    """The group ``fp8``.

    Attributes:
        mode: ``unified`` trains and rolls out in FP8; ``rollout`` trains in bf16 and rolls out in FP8.
        backend: what computes the trainer's FP8 linears: ``reference`` (torch on any device), ``auto`` chooses by hardware.
        weight_sync: ``codes`` ships FP8 codes and scales; ``bf16`` ships bf16 and quantises on arrival, with the same quantiser.
        sync_timeout: seconds the trainer waits for the rollout to take one bucket of weights before it gives up.
        scale_format: ``auto``, ``fp32`` or ``pow2``; ``recipe`` holds what it resolved to.
        recipe: the arithmetic.
        layers: which linear layers are FP8.
    """

    mode: str = "unified"
    backend: str = "auto"
    weight_sync: str = "codes"
    sync_timeout: float = 60.0
    scale_format: str = "auto"
    recipe: Recipe = field(default_factory=Recipe)
    layers: LayerFilter = field(default_factory=LayerFilter)

    @classmethod
    def parse(cls, node: Mapping[str, Any], *, capability: tuple[int, int] | None = None) -> "Fp8Settings":
        """Read the configuration node ``fp8``.

        Args:
            node: mode, backend, weight_sync, sync_timeout and recipe, as in conf/fp8/*.yaml; plain or OmegaConf mapping.
            capability: compute capability of the GPU, None without one; decides ``scale_format=auto``.

        Raises:
            ConfigError: an unknown key, a wrong type or value.
        """
        node = _mapping("fp8", node)
        recipe = dict(_mapping("fp8.recipe", node.get("recipe", {})))
        known = {"mode", "backend", "weight_sync", "sync_timeout", "recipe"}
        _refuse_unknown("fp8", node, known)
        layers = LayerFilter(exclude=recipe.pop("exclude", ()))
        known_recipe = {f.name for f in fields(Recipe)} - {"activation_block", "gradient_block"}
        _refuse_unknown("fp8.recipe", recipe, known_recipe | {"exclude"})
        requested = recipe.pop("scale_format", "auto")
        recipe["scale_format"] = resolve_scale_format(requested, capability)
        block = recipe.get("weight_block", (128, 128))
        if isinstance(block, (list, tuple)) or hasattr(block, "__len__") and not isinstance(block, (str, Mapping)):
            # One scale of each operand covers the same stretch of K, so the other two follow from the weight's columns.
            columns = block[1] if len(block) == 2 else None
            recipe["activation_block"] = recipe["gradient_block"] = (1, columns)
            if columns is None or type(columns) is not int:
                recipe.pop("activation_block"), recipe.pop("gradient_block")  # Recipe names weight_block
        timeout = node.get("sync_timeout", 60.0)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
            raise ConfigError(f"fp8.sync_timeout={timeout!r}", "not a positive number", "set fp8.sync_timeout to seconds")
        return cls(
            mode=_one_of("fp8.mode", node.get("mode", "unified"), MODES),
            backend=_one_of("fp8.backend", node.get("backend", "auto"), BACKENDS),
            weight_sync=_one_of("fp8.weight_sync", node.get("weight_sync", "codes"), WEIGHT_SYNCS),
            sync_timeout=float(timeout),
            scale_format=requested,
            recipe=Recipe.from_dict(recipe),
            layers=layers,
        )


def resolve_scale_format(requested: str, capability: tuple[int, int] | None) -> str:
    """``auto`` -> ``fp32`` on Hopper and without a GPU, ``pow2`` on Blackwell (its tensor cores take UE8M0 scales only).

    Raises:
        ConfigError: ``fp32`` asked for on compute capability 10 or newer, or an unknown value.
    """
    _one_of("fp8.recipe.scale_format", requested, ("auto", "fp32", "pow2"))
    blackwell = capability is not None and capability[0] >= 10
    if requested == "fp32" and blackwell:
        raise ConfigError(
            "fp8.recipe.scale_format=fp32",
            f"a GPU of compute capability {capability[0]}.{capability[1]}, which runs the blockwise recipe with power-of-two scales only",
            "set fp8.recipe.scale_format=pow2 or auto",
        )
    if requested == "auto":
        return "pow2" if blackwell else "fp32"
    return requested


@dataclass(frozen=True)
class CorrectionSettings:
    """The group ``is_correction``.

    Attributes:
        method: ``ais`` or ``none``.
        allow_truncated_support: accept top_p, top_k or min_p sampling, whose rollout probabilities are renormalised over a
            smaller support than the trainer's.
        parameters: the fields of :class:`verl_fp8.ais.AISConfig` that were given.
    """

    method: str = "ais"
    allow_truncated_support: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> "CorrectionSettings":
        """Read the configuration node ``is_correction``.

        Raises:
            ConfigError: an unknown key, a wrong type or value.
        """
        node = dict(_mapping("is_correction", node))
        method = _one_of("is_correction.method", node.pop("method", "ais"), METHODS)
        allow = node.pop("allow_truncated_support", False)
        if not isinstance(allow, bool):
            raise ConfigError(
                f"is_correction.allow_truncated_support={allow!r}", "not true or false", "set it to true or false"
            )
        _refuse_unknown("is_correction", node, set(AIS_KEYS) if method == "ais" else set(), always=("method", "allow_truncated_support"))
        return cls(method=method, allow_truncated_support=allow, parameters=node)


AIS_KEYS = ("clip", "delta", "gamma", "beta_var", "eps", "level", "max_nonfinite_fraction")


def _mapping(key: str, node: Any) -> Mapping[str, Any]:
    if isinstance(node, str):
        raise ConfigError(
            f"+{key}={node}",
            f"the plain string {node!r} under {key}: the configuration group was not on Hydra's search path",
            "install verl_fp8 in this environment and leave VERL_USE_EXTERNAL_PLUGINS at auto",
        )
    if not isinstance(node, Mapping) and not hasattr(node, "items"):
        raise ConfigError(f"{key}={node!r}", f"a {type(node).__name__}", f"select the group with +{key}=<name>")
    return node


def _refuse_unknown(key: str, node: Mapping[str, Any], known: set[str], always: tuple[str, ...] = ()) -> None:
    for name in node:
        if name not in known:
            allowed = ", ".join(sorted({*known, *always}))
            raise ConfigError(f"{key}.{name}={node[name]!r}", "no such key", f"use one of {allowed}")


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{key}={value!r}", "not a value it can take", f"set it to one of {', '.join(allowed)}")
    return value
