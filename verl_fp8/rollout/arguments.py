"""What the ``fp8`` group sets in vLLM's arguments, computed from the same Recipe and LayerFilter as the trainer's
swap."""

import json
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_fp8.errors import ConfigError
from verl_fp8.layers.shapes import load_config, split_layers
from verl_fp8.switches.hardware import Hardware, probe, resolve_rollout_kernel
from verl_fp8.switches.settings import NODE, Fp8Settings

EXTENSION = "verl_fp8.rollout.worker.Fp8WorkerExtension"
# vLLM's name of our own quantisation method, for per-tensor and per-channel scales (verl_fp8.rollout.linear_cpu).
METHOD = "verl_fp8"


def plain(node: Any) -> Any:
    """OmegaConf nodes as plain containers, anything else unchanged."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def fp8_arguments(fp8: Any, model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The user's ``engine_kwargs.vllm`` with ours added.

    ``hf_overrides.quantization_config`` is vLLM's fp8 block format, or our own method's for per-tensor and per-channel
    scales, with the exact names of the layers kept in bf16 (absent for ``fp8.mode=bf16``);
    ``additional_config.verl_fp8`` carries the whole ``fp8`` node to the vLLM workers, whose kernel and handshake read
    it.

    Raises:
        ConfigError: the user's own arguments contradict the recipe.
    """
    fp8, model, kwargs = plain(fp8), plain(model), {k: plain(v) for k, v in kwargs.items()}
    settings = Fp8Settings.parse(fp8)
    _, kept, _ = split_layers(load_config(model), settings.layer_filter)
    overrides = dict(kwargs.get("hf_overrides") or {})
    quantization = {
        "quant_method": "fp8",
        "fmt": settings.recipe.fmt,
        "activation_scheme": "dynamic",
        "weight_block_size": list(settings.recipe.weight_block),
        "ignored_layers": sorted(kept),
    }
    if settings.recipe.weights != "block":
        quantization = {"quant_method": METHOD, "ignored_layers": quantization["ignored_layers"]}
    if settings.layer_filter is None:
        quantization = None
    if overrides.get("quantization_config", quantization) != quantization:
        raise ConfigError(
            "+fp8 with its own quantization_config",
            "another one in actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides",
            "remove hf_overrides.quantization_config; fp8.recipe.* sets it",
        )
    method = None if quantization is None else "fp8"
    for key, wanted in (("worker_extension_cls", EXTENSION), ("quantization", method), ("kv_cache_dtype", "auto")):
        if kwargs.get(key, wanted) != wanted:
            raise ConfigError(
                f"+fp8, which needs {key}={wanted}",
                f"actor_rollout_ref.rollout.engine_kwargs.vllm.{key}={kwargs[key]}",
                f"remove engine_kwargs.vllm.{key}",
            )
    kwargs["worker_extension_cls"] = EXTENSION
    kwargs["hf_overrides"] = overrides
    if quantization is not None:
        kwargs["hf_overrides"]["quantization_config"] = quantization
    if settings.lm_head == "fp32":
        kwargs["hf_overrides"]["head_dtype"] = "float32"
    kwargs["additional_config"] = {**(kwargs.get("additional_config") or {}), NODE: fp8}
    if probe().capability is not None and quantization is not None:
        pin_gpu_kernels(settings, probe(), kwargs)
    return kwargs


def pin_gpu_kernels(settings: Fp8Settings, hardware: Hardware, kwargs: dict[str, Any]) -> None:
    """Leave vLLM no choice of FP8 kernels on a GPU: each has numerics of its own. Changes ``kwargs`` in place.

    The fusion passes would quantise inside other kernels, without the recipe's scale format and without the bf16
    rounding before it (vllm/compilation/passes/fusion); FlashInfer's dynamic kernel has other numerics below 32 tokens.

    Raises:
        ConfigError: the user's own arguments choose otherwise.
    """
    where = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    kernel = resolve_rollout_kernel(settings.rollout_kernel, settings.recipe, hardware)
    nested = kwargs.get("kernel_config") or {}
    for key, wanted in (
        ("linear_backend", kernel),
        ("moe_backend", "deep_gemm" if kernel == "deep_gemm" else "triton"),
    ):
        for path, found in ((key, kwargs.get(key)), (f"kernel_config.{key}", nested.get(key))):
            if found not in (None, "auto", wanted):
                raise ConfigError(
                    f"fp8.rollout_kernel={settings.rollout_kernel}, which is {key}={wanted} here",
                    f"{where}.{path}={found}",
                    f"remove {where}.{path}; fp8.rollout_kernel sets it",
                )
        kwargs[key] = wanted
    compilation = _compilation(kwargs.get("compilation_config"), f"{where}.compilation_config")
    passes = dict(compilation.get("pass_config") or {})
    for fusion in ("fuse_norm_quant", "fuse_act_quant"):
        if passes.get(fusion):
            raise ConfigError(
                "+fp8, whose quantiser must see what the trainer's sees",
                f"{where}.compilation_config.pass_config.{fusion}={passes[fusion]}",
                f"remove {fusion}",
            )
        passes[fusion] = False
    kwargs["compilation_config"] = {**compilation, "pass_config": passes}


def _compilation(value: Any, path: str) -> dict[str, Any]:
    """vLLM's ``compilation_config`` as a mapping; it also takes JSON."""
    parsed = value or {}
    if isinstance(parsed, str):
        try:
            parsed = json.loads(parsed)
        except json.JSONDecodeError:
            parsed = None
    if not isinstance(parsed, Mapping):
        raise ConfigError(
            "+fp8, which sets compilation_config.pass_config", f"{path}={value!r}", f"write {path}.<key>=<value>"
        )
    return dict(parsed)
