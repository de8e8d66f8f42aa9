"""The linear layers of a Hugging Face model by name and shape, from its configuration alone."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import LayerFilter, is_router

# verl's keys of a model that say which configuration it has.
MODEL_KEYS = ("path", "hf_config_path", "trust_remote_code", "override_config")


def shapes_of_config(config: Any) -> dict[str, tuple[int, int]]:
    """:func:`linear_shapes` of the causal LM that ``config`` describes, built on the meta device; allocates nothing.

    Raises:
        ConfigError: not a causal LM, or one with fused experts in an unknown layout.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(
            "the linear layers of the causal language model at actor_rollout_ref.model.path",
            f"a {type(config).__name__}, which AutoModelForCausalLM does not build ({str(error).splitlines()[0]})",
            "use a text-only model, or remove +fp8",
        ) from error
    return linear_shapes(model)


def load_config(model: Mapping[str, Any]) -> Any:
    """The Hugging Face configuration verl will build the model from.

    Args:
        model: :data:`MODEL_KEYS`, as under ``actor_rollout_ref.model``.
    """
    path = model.get("hf_config_path") or model["path"]
    overrides = model.get("override_config") or {}
    overrides = overrides.get("model_config", overrides)
    plain = {k: v for k, v in dict(overrides).items() if k != "attn_implementation"}
    return _load(str(path), bool(model.get("trust_remote_code", False)), json.dumps(plain, sort_keys=True, default=str))


@functools.lru_cache(maxsize=8)
def _load(path: str, trust_remote_code: bool, overrides: str) -> Any:
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    config = AutoConfig.from_pretrained(copy_to_local(path), trust_remote_code=trust_remote_code)
    for key, value in json.loads(overrides).items():
        setattr(config, key, value)
    return config


def split_layers(
    config: Any, layers: LayerFilter | None
) -> tuple[tuple[str, ...], dict[str, str], dict[str, tuple[int, int]]]:
    """(converted names, kept name -> reason, name -> shape) for a model described by its configuration.

    Args:
        config: the Hugging Face configuration.
        layers: None for a run without FP8 layers (``fp8.mode=bf16``).

    Raises:
        ConfigError: nothing would be converted, or ``fp8.recipe.exclude`` is wrong.
    """
    shapes = shapes_of_config(config)
    if layers is None:
        return (), dict.fromkeys(shapes, "fp8.mode=bf16"), shapes
    converted, kept = layers.split(shapes)
    if not converted:
        raise ConfigError(
            "FP8 linear layers (+fp8)",
            f"none of the {len(shapes)} linear layers of {type(config).__name__} would be converted "
            f"({', '.join(sorted(set(kept.values()))) or 'the model has no linear layer'})",
            "loosen fp8.recipe.exclude or remove +fp8",
        )
    return converted, kept, shapes


def linear_shapes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of every linear layer below ``module``, in module order.

    Those are the ``nn.Linear``, the projections of fused experts under the checkpoint's names, and routers, which
    transformers writes as modules of their own and vLLM as linear layers.

    Raises:
        ConfigError: fused experts in an unknown layout.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for name, m in module.named_modules(remove_duplicate=False):
        weight = m._parameters.get("weight")
        if is_experts(m):
            shapes |= expert_shapes(name, m)
        elif name and (isinstance(m, nn.Linear) or (is_router(name) and weight is not None and weight.ndim == 2)):
            shapes[name] = tuple(weight.shape)
        elif fused := [
            n for n, p in m._parameters.items() if p is not None and p.ndim == 3 and "experts" in name.split(".")
        ]:
            raise ConfigError(
                "FP8 linear layers in trainer and rollout (+fp8)",
                f"experts in one tensor, {name}.{fused[0]}, in a layout this package does not know",
                "use a model with Qwen3-MoE's layout of experts, or remove +fp8",
            )
    return shapes


def not_plain(linears: Mapping[str, nn.Linear], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Name -> reason for the linear layers no filter may choose."""
    owners: dict[int, dict[int, str]] = {}
    for name, owner in modules.items():
        for parameter in owner.parameters(recurse=False):
            owners.setdefault(id(parameter), {})[id(owner)] = name
    reasons = {}
    for name, linear in linears.items():
        others = [other for owner, other in owners[id(linear.weight)].items() if owner != id(linear)]
        if type(linear) is not nn.Linear:
            reasons[name] = f"not a plain nn.Linear but {type(linear).__name__}"
        elif others:
            reasons[name] = f"weight tied to {others[0]}"
    return reasons


FUSED = ("gate_up_proj", "down_proj")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer in 3-D parameters ``gate_up_proj`` and ``down_proj``."""
    return all(isinstance(p := module._parameters.get(name), nn.Parameter) and p.ndim == 3 for name in FUSED)


def expert_shapes(name: str, module: nn.Module) -> dict[str, tuple[int, int]]:
    """``<name>.<expert>.gate_proj`` and so on -> (out, in): the checkpoint's names, which verl's sync streams
    (verl/workers/engine/fsdp/utils.py, unfuse_moe_params) and vLLM loads.

    Raises:
        ConfigError: another layout than a gated [experts, out, in], gate before up, without bias, at ``*.mlp.experts``.
    """
    expected = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    different = [
        f"{key}={found}" for key, value in expected.items() if (found := getattr(module, key, None)) is not value
    ]
    if different or not f".{name}".endswith(".mlp.experts"):
        raise ConfigError(
            "FP8 experts (+fp8)",
            f"{type(module).__name__} at {name}{' with ' + ', '.join(different) if different else ''}",
            "use a model with gated, bias-free experts at *.mlp.experts (Qwen3-MoE's layout), or remove +fp8",
        )
    experts, double, hidden = module.gate_up_proj.shape
    width = module.down_proj.shape[2]
    if module.down_proj.shape != (experts, hidden, double // 2):
        raise ConfigError(
            "FP8 experts (+fp8)",
            f"{name} with gate_up_proj {tuple(module.gate_up_proj.shape)} "
            f"and down_proj {tuple(module.down_proj.shape)}",
            "use a model whose experts have one width, or remove +fp8",
        )
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return {f"{name}.{e}.{leaf}": shapes[leaf] for e in range(experts) for leaf in PROJECTIONS}
