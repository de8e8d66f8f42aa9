"""Every key of the run's configuration that the driver writes, each with its reason. Nothing else here writes to it.

Filling is the last of the three steps, after reading and judging. :func:`keys` is pure; :func:`write` is the one place
that changes the user's configuration. Filling a filled configuration changes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fp8.rules.asked import ENVIRONMENT, Run
from verl_fp8.rules.megatron import bf16_keys

_MEGATRON = "actor_rollout_ref.actor.megatron.override_transformer_config"

# Pattern of a path -> why the driver writes it. `verl-fp8 explain` prints the same words.
REASONS = {
    f"{_MEGATRON}.*_bf16": "the decoder layers that fp8.recipe.exclude keeps in bf16",
    f"{ENVIRONMENT}.*": "an exported variable reaches no Ray cluster that is already up",
}


@dataclass(frozen=True)
class FilledKey:
    """A key that the driver writes."""

    path: str
    value: Any

    @property
    def reason(self) -> str:
        """Why, from :data:`REASONS`."""
        return next(why for pattern, why in REASONS.items() if fnmatchcase(self.path, pattern))


def keys(run: Run) -> tuple[FilledKey, ...]:
    """What the driver writes for a run that no rule refuses; empty without ``fp8``."""
    if run.fp8 is None:
        return ()
    variables = (*run.megatron_variables, *run.vllm_variables)
    filled = [FilledKey(f"{ENVIRONMENT}.{v.name}", v.value) for v in variables if v.value is not None]
    if run.fp8.megatron:
        filled += [FilledKey(f"{_MEGATRON}.{key}", value) for key, value in bf16_keys(run).items()]
    return tuple(filled)


def write(config: DictConfig, filled: Iterable[FilledKey]) -> None:
    """Write the keys into the configuration, creating the nodes above them."""
    for key in filled:
        OmegaConf.update(config, key.path, key.value, force_add=True)
