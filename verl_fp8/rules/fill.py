"""Every key of the run's configuration that the driver writes after judging it, in one place."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import is_router
from verl_fp8.rules.refuse import get
from verl_fp8.trainer.megatron_environment import ASKED


def set_environment(config: DictConfig, variables: dict[str, str | None], asked: str) -> None:
    """Every Ray worker's, by verl's own key; None: not to be set."""
    path = "ray_kwargs.ray_init.runtime_env.env_vars"
    for name, value in variables.items():
        found = get(config, f"{path}.{name}")
        if found is not None and str(found) != value:
            needs = f"{name} unset" if value is None else f"{name}={value}"
            raise ConfigError(f"{asked}, which needs {needs}", f"{path}.{name}={found}", f"remove {path}.{name}")
        if value is not None:
            OmegaConf.update(config, f"{path}.{name}", value, force_add=True)


def bf16_layers(layers: int, converted: tuple[str, ...], kept: Mapping[str, str]) -> dict[str, Any]:
    """TransformerConfig's keys for the decoder layers that ``fp8.recipe.exclude`` keeps in bf16; empty without any.

    Args:
        layers: of the decoder.
        converted: names of the FP8 linear layers.
        kept: name -> reason for the others.

    Raises:
        ConfigError: not whole layers at the start and the end, which is all that Megatron has keys for.
    """
    fp8 = {_layer(name) for name in converted}
    excluded = {name for name, why in kept.items() if why.startswith("excluded") and not is_router(name)}
    bf16 = {_layer(name) for name in excluded} - {None}
    asked = f"fp8.recipe.exclude with {ASKED}"
    fix = "exclude whole layers at the start or the end, e.g. ['model.layers.0.*'], or use +fp8=unified"
    if partly := fp8 & bf16:
        name = min(n for n in excluded if _layer(n) in partly)
        raise ConfigError(asked, f"{name} in a decoder layer with FP8 ones; Megatron has one precision for each", fix)
    start = next(i for i in range(layers + 1) if i not in bf16)
    end = next(i for i in range(layers + 1) if layers - 1 - i not in bf16)
    if len(bf16) != start + end:
        inside = min(i for i in bf16 if start <= i < layers - end)
        raise ConfigError(asked, f"layer {inside} of {layers} in bf16 between FP8 ones", fix)
    if not bf16:
        return {}
    return {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}


def _layer(name: str) -> int | None:
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return None if found is None else int(found[1])
