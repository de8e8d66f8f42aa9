"""The two groups as values: ``fp8`` -> :class:`Fp8Settings`, ``is_correction`` -> :class:`CorrectionSettings`.

Every process parses the same configuration nodes with the same code. An unknown key or a wrong type raises and names
the key. Nothing here knows verl. What ``auto`` means is decided in :mod:`verl_fp8.switches.hardware`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl_fp8.errors import ConfigError, is_number
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics.recipe import ACTIVATIONS, WEIGHTS, Recipe
from verl_fp8.switches import hardware
from verl_fp8.switches.hardware import BACKENDS, ROLLOUT_KERNELS

# Under vLLM's additional_config: the whole fp8 node, for vLLM's own processes.
NODE = "verl_fp8"

MODES = ("unified", "unified_megatron", "rollout", "bf16")
# What +fp8= takes: the modes, and conf/fp8/rollout_per_tensor.yaml, which is rollout with two keys set.
CHOICES = (*MODES, "rollout_per_tensor")
WEIGHT_SYNCS = ("codes", "bf16")
LM_HEADS = ("model", "fp32")


@dataclass(frozen=True)
class Fp8Settings:
    """The group ``fp8``.

    Attributes:
        mode: ``unified`` trains and rolls out in FP8; ``unified_megatron`` does so with Megatron instead of FSDP2;
            ``rollout`` trains in bf16 and rolls out in FP8;
            ``bf16`` has no FP8 layer at all: it gives the output head's precision, the verified sync and the mismatch
            metrics only.
        backend: what computes the trainer's FP8 linears: ``te`` (TransformerEngine), ``torch`` (scaled_mm, Hopper),
            ``reference`` (plain torch on any device), ``auto`` (hardware.resolve_backend).
        rollout_kernel: what computes vLLM's on a GPU: ``torch``, ``cutlass``, ``deep_gemm`` or ``auto``
            (hardware.resolve_rollout_kernel).
        weight_sync: ``codes`` ships FP8 codes and scales; ``bf16`` ships bf16 and quantises on arrival, with the same
            quantiser.
        sync_timeout: seconds the trainer waits for the rollout to take one bucket of weights before it gives up.
        exact: make the trainer's forward and the rollout's equal to the bit (verl_fp8.numerics.exact).
        lm_head: ``model`` computes the output head in the model's precision, ``fp32`` in float32, on both sides.
        scale_format: ``auto``, ``fp32`` or ``pow2``; ``recipe`` holds what it resolved to.
        recipe: the arithmetic.
        layers: which linear layers are FP8.
    """

    mode: str = "unified"
    backend: str = "auto"
    rollout_kernel: str = "auto"
    weight_sync: str = "codes"
    sync_timeout: float = 60.0
    exact: bool = False
    lm_head: str = "model"
    scale_format: str = "auto"
    recipe: Recipe = field(default_factory=Recipe)
    layers: LayerFilter = field(default_factory=LayerFilter)

    @property
    def megatron(self) -> bool:
        """Whether the trainer is verl's Megatron engine."""
        return self.mode == "unified_megatron"

    @property
    def layer_filter(self) -> LayerFilter | None:
        """Which linear layers are FP8 on some side; None where none is (``mode=bf16``)."""
        return None if self.mode == "bf16" else self.layers

    @classmethod
    def parse(cls, node: Mapping[str, Any], *, capability: tuple[int, int] | None | str = "probe") -> "Fp8Settings":
        """Read the configuration node ``fp8``.

        Args:
            node: the keys of conf/fp8/*.yaml; plain or OmegaConf mapping.
            capability: compute capability of the GPU, None without one, ``probe`` for this machine's; decides
                ``scale_format=auto``.

        Raises:
            ConfigError: an unknown key, a wrong type or value.
        """
        node = _mapping("fp8", node)
        recipe = dict(_mapping("fp8.recipe", node.get("recipe", {})))
        known = {"mode", "backend", "rollout_kernel", "weight_sync", "sync_timeout", "exact", "lm_head", "recipe"}
        _refuse_unknown("fp8", node, known)
        layers = LayerFilter(exclude=recipe.pop("exclude", ()))
        known_recipe = {f.name for f in fields(Recipe)} - {"activation_block", "gradient_block"}
        _refuse_unknown("fp8.recipe", recipe, known_recipe | {"exclude", "weights", "activations"})
        requested = recipe.pop("scale_format", "auto")
        if capability == "probe":
            capability = hardware.probe().capability
        recipe["scale_format"] = hardware.resolve_scale_format(requested, capability)
        mode = _one_of("fp8.mode", node.get("mode", "unified"), MODES)
        _set_blocks(recipe, mode)
        timeout = node.get("sync_timeout", 60.0)
        if not _is_positive(timeout):
            raise ConfigError(
                f"fp8.sync_timeout={timeout!r}", "not a positive number", "set fp8.sync_timeout to seconds"
            )
        settings = cls(
            mode=mode,
            backend=_one_of("fp8.backend", node.get("backend", "auto"), BACKENDS),
            rollout_kernel=_one_of("fp8.rollout_kernel", node.get("rollout_kernel", "auto"), ROLLOUT_KERNELS),
            weight_sync=_one_of("fp8.weight_sync", node.get("weight_sync", "codes"), WEIGHT_SYNCS),
            sync_timeout=float(timeout),
            exact=_flag("fp8.exact", node.get("exact", False)),
            lm_head=_one_of("fp8.lm_head", node.get("lm_head", "model"), LM_HEADS),
            scale_format=requested,
            recipe=Recipe.from_dict(recipe),
            layers=layers,
        )
        _check_granularity(settings)
        return settings


@dataclass(frozen=True)
class DumpSettings:
    """What ``is_correction.dump`` writes (see :mod:`verl_fp8.correction.dump`).

    Attributes:
        folder: where one file a batch goes.
        steps: number of training steps to write, None for all.
        max_bytes: upper limit of the folder's size; nothing is written beyond it.
    """

    folder: str
    steps: int | None = None
    max_bytes: int = 1 << 30


@dataclass(frozen=True)
class CorrectionSettings:
    """The group ``is_correction``.

    Attributes:
        method: one of ``METHODS``.
        allow_truncated_support: accept top_p, top_k or min_p sampling, whose rollout probabilities are renormalised
            over a smaller support than the trainer's.
        parameters: the method's own keys (``METHOD_KEYS``) that were given. For ``ais`` the fields of
            :class:`verl_fp8.correction.ais.AISConfig`, where delta may be ``auto``.
        scope: AIS: the rows that share one alpha, ``batch`` or ``mini_batch`` (one optimizer step).
        mode: AIS: ``apply``, or ``shadow``: compute and log only.
        delta_factor: AIS with ``delta=auto``: delta is this many times the noise floor.
        delta_steps: AIS with ``delta=auto``: the floor is the mean of ``ais/mean_abs_logp_diff`` over that many steps.
        dump: what to write for ``verl-fp8 replay``, None for nothing.
    """

    method: str = "ais"
    allow_truncated_support: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)
    scope: str = "batch"
    mode: str = "apply"
    delta_factor: float = 2.0
    delta_steps: int = 3
    dump: DumpSettings | None = None

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> "CorrectionSettings":
        """Read the configuration node ``is_correction``.

        Raises:
            ConfigError: an unknown key, a wrong type or value.
        """
        node = dict(_mapping("is_correction", node))
        method = _one_of("is_correction.method", node.get("method", "ais"), METHODS)
        _refuse_unknown(
            "is_correction", node, {*COMMON_KEYS, *METHOD_KEYS[method], *(AIS_STAGE_KEYS if method == "ais" else ())}
        )
        allow = node.get("allow_truncated_support", False)
        return cls(
            method=method,
            allow_truncated_support=_flag("is_correction.allow_truncated_support", allow),
            parameters={key: node[key] for key in METHOD_KEYS[method] if key in node},
            scope=_one_of("is_correction.scope", node.get("scope", "batch"), SCOPES),
            mode=_one_of("is_correction.mode", node.get("mode", "apply"), AIS_MODES),
            delta_factor=_positive("is_correction.delta_factor", node.get("delta_factor", 2.0)),
            delta_steps=_count("is_correction.delta_steps", node.get("delta_steps", 3)),
            dump=_dump(node),
        )


METHOD_KEYS = {
    "ais": ("clip", "delta", "gamma", "beta_var", "eps", "level", "max_nonfinite_fraction", "ema"),
    "tis": ("clip", "batch_normalize"),
    "tis_seq": ("clip", "batch_normalize"),
    "icepop": ("low", "high", "batch_normalize"),
    "mis": ("clip", "low", "high", "batch_normalize"),
    "geo_rs": ("low", "high"),
    "k3_rs": ("max_k3",),
    "none": (),
}
METHODS = tuple(METHOD_KEYS)
AIS_STAGE_KEYS = ("scope", "mode", "delta_factor", "delta_steps")
COMMON_KEYS = ("method", "allow_truncated_support", "dump", "dump_steps", "dump_max_bytes")
SCOPES = ("batch", "mini_batch")
AIS_MODES = ("apply", "shadow")


def _set_blocks(recipe: dict[str, Any], mode: str) -> None:
    """Turn ``weights``, ``activations`` and ``weight_block`` into the three blocks of :class:`Recipe`, in place."""
    weights = _one_of("fp8.recipe.weights", recipe.pop("weights", "block"), tuple(WEIGHTS))
    activations = _one_of("fp8.recipe.activations", recipe.pop("activations", "group"), tuple(ACTIVATIONS))
    asked = f"fp8.recipe.weights={weights}, fp8.recipe.activations={activations}"
    if mode == "unified" and (weights, activations) != ("block", "group"):
        raise ConfigError(
            asked,
            "fp8.mode=unified: TransformerEngine's blockwise recipe and torch's scaled_mm train with blocks",
            "use +fp8=rollout (bf16 training), or set fp8.recipe.weights=block and fp8.recipe.activations=group",
        )
    if (weights == "block") != (activations == "group"):
        # One scale of each operand covers the same stretch of K.
        others = "token or tensor" if activations == "group" else "group"
        other_weights = "block" if weights != "block" else "channel or tensor"
        raise ConfigError(
            asked,
            "scales that no GEMM combines: of one operand over a stretch of the contracted dimension, "
            "of the other over all of it",
            f"set fp8.recipe.activations={others}, or fp8.recipe.weights={other_weights}",
        )
    block = recipe.get("weight_block", (128, 128))
    listed = hasattr(block, "__len__") and not isinstance(block, (str, Mapping))
    if weights != "block":
        if not listed or list(block) != [128, 128]:
            found = f"fp8.recipe.weight_block={block}, which only weights=block reads"
            raise ConfigError(asked, found, "remove fp8.recipe.weight_block, or set fp8.recipe.weights=block")
        recipe["weight_block"], recipe["activation_block"] = WEIGHTS[weights], ACTIVATIONS[activations]
        recipe["gradient_block"] = ACTIVATIONS["token"]  # no trainer's: refused above
    elif listed and any(type(side) is int and side < 1 for side in block):
        raise ConfigError(
            f"fp8.recipe.weight_block={block}", "not a value it can take", "give two positive integers, e.g. [128, 128]"
        )
    elif listed and len(block) == 2 and type(block[1]) is int:
        # The other two follow from the weight's columns; of anything else Recipe names weight_block.
        recipe["activation_block"] = recipe["gradient_block"] = (1, block[1])


def _check_granularity(settings: Fp8Settings) -> None:
    """The backends and vLLM's kernels on a GPU know blocks only."""
    recipe = settings.recipe
    if recipe.weights == "block":
        return
    asked = f"fp8.recipe.weights={recipe.weights}, fp8.recipe.activations={recipe.activations}"
    if settings.backend not in ("auto", "reference"):
        raise ConfigError(
            asked, f"fp8.backend={settings.backend}, whose scales are of 128x128 blocks", "remove fp8.backend"
        )
    if settings.rollout_kernel != "auto":
        raise ConfigError(
            asked,
            f"fp8.rollout_kernel={settings.rollout_kernel}, a kernel of 128x128 blocks",
            "remove fp8.rollout_kernel",
        )


def _dump(node: Mapping[str, Any]) -> DumpSettings | None:
    folder = node.get("dump")
    if folder is None:
        return None
    if not isinstance(folder, str) or not folder.strip():
        raise ConfigError(
            f"is_correction.dump={folder!r}", "not a path", "set is_correction.dump to a folder, or to null"
        )
    steps = node.get("dump_steps")
    return DumpSettings(
        folder=folder,
        steps=None if steps is None else _count("is_correction.dump_steps", steps),
        max_bytes=_count("is_correction.dump_max_bytes", node.get("dump_max_bytes", DumpSettings.max_bytes)),
    )


def _positive(key: str, value: Any) -> float:
    if not _is_positive(value):
        raise ConfigError(f"{key}={value!r}", "not a positive number", f"set {key} to a positive number")
    return float(value)


def _is_positive(value: Any) -> bool:
    return is_number(value) and 0 < value < float("inf")


def _count(key: str, value: Any) -> int:
    if not (is_number(value) and isinstance(value, int) and value >= 1):
        raise ConfigError(
            f"{key}={value!r}", "not a whole number of at least 1", f"set {key} to a positive whole number"
        )
    return value


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


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r}", "not true or false", f"set {key} to true or false")
    return value


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{key}={value!r}", "not a value it can take", f"set it to one of {', '.join(allowed)}")
    return value


BACKEND = "fsdp2_fp8"
MEGATRON_BACKEND = "megatron_fp8"


def settings_of(vllm_config: Any) -> Fp8Settings | None:
    """The ``fp8`` node a vLLM process was started with, parsed; None for a vLLM that is not ours."""
    additional = getattr(vllm_config, "additional_config", None)
    node = additional.get(NODE) if isinstance(additional, Mapping) else None
    return None if node is None else Fp8Settings.parse(node)
