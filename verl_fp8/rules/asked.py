"""The run that is judged: the two switches parsed, and the facts about it that several rules want.

Reading comes first. :func:`read` parses the nodes ``fp8`` and ``is_correction``, and keeps as refusals what it cannot
parse. The facts (layers, kernels, variables) are worked out when the first rule asks for one, and kept. A fact that
cannot be worked out raises, each time it is asked for.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fp8.errors import ConfigError, Fp8Error
from verl_fp8.layers.shapes import load_config, split_layers
from verl_fp8.rollout.environment import environment
from verl_fp8.rules.refuse import Refusal, get
from verl_fp8.switches.hardware import Hardware, probe, resolve_backend, resolve_rollout_kernel
from verl_fp8.switches.settings import CorrectionSettings, Fp8Settings
from verl_fp8.trainer import megatron_environment

# verl's key for the environment of every Ray worker.
ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"
GROUP_CHOICES = {"fp8": "mode", "is_correction": "method"}


@dataclasses.dataclass(frozen=True)
class Layers:
    """The linear layers of the run's model.

    Attributes:
        hf_config: its Hugging Face configuration.
        converted: names of the FP8 layers.
        kept: name -> reason for the others.
        shapes: name -> (out, in) of all.
    """

    hf_config: Any
    converted: tuple[str, ...]
    kept: Mapping[str, str]
    shapes: Mapping[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Variable:
    """An environment variable that the workers need: ``value``, or unset for None; ``asked`` says what needs it."""

    name: str
    value: str | None
    asked: str


@dataclasses.dataclass(frozen=True)
class Run:
    """A composed configuration and what the switches ask of it. Nothing here writes to the configuration.

    Attributes:
        config: the whole tree.
        fp8: the group ``fp8``, None if it was not selected or cannot be read.
        correction: the group ``is_correction``, likewise.
        unreadable: why a group cannot be read.
        machine: the machine that this is judged for.
    """

    config: DictConfig
    fp8: Fp8Settings | None
    correction: CorrectionSettings | None
    unreadable: tuple[Refusal, ...]
    machine: Hardware

    @cached_property
    def asked(self) -> str:
        """The switches as the user would write them, e.g. ``+fp8=unified +is_correction=ais``; empty without one."""
        settings = {"fp8": self.fp8 and self.fp8.mode, "is_correction": self.correction and self.correction.method}
        words = []
        for group, choice in GROUP_CHOICES.items():
            if (node := get(self.config, group)) is not None:
                words.append(f"+{group}={settings[group] or (get(node, choice) if is_group(node) else node)}")
        return " ".join(words)

    @property
    def composed(self) -> bool:
        """Whether each switch is a node that Hydra composed. Otherwise nothing else of it is in the configuration."""
        return all(is_group(node) for group in GROUP_CHOICES if (node := get(self.config, group)) is not None)

    def plain(self, path: str) -> Any:
        """A node below ``actor_rollout_ref`` as plain containers, interpolations resolved."""
        return OmegaConf.to_container(OmegaConf.select(self.config, f"actor_rollout_ref.{path}"), resolve=True)

    @property
    def on_cpu(self) -> bool:
        """Whether the workers train on CPUs."""
        return get(self.config, "trainer.device") == "cpu"

    @property
    def machine_will_train(self) -> bool:
        """Whether this machine is of the kind that trains, so that ``auto`` means here what it means there."""
        return self.on_cpu or self.machine.capability is not None

    @property
    def judges_kernels(self) -> bool:
        """Whether kernels are chosen, for this machine: there is an FP8 layer, and the machine will train."""
        return self.machine_will_train and self.fp8.layer_filter is not None

    @cached_property
    def backend(self) -> str | None:
        """What computes the trainer's linears; None where this machine cannot tell."""
        if not self.judges_kernels:
            return "bf16" if self.machine_will_train else None
        if self.fp8.mode == "rollout":
            return "bf16"
        return resolve_backend("reference" if self.fp8.exact else self.fp8.backend, self.fp8.recipe, self.machine)

    @cached_property
    def kernel(self) -> str | None:
        """What computes vLLM's linears; None where this machine cannot tell."""
        if not self.judges_kernels:
            return self.backend
        return resolve_rollout_kernel(self.fp8.rollout_kernel, self.fp8.recipe, self.machine)

    @cached_property
    def megatron_variables(self) -> tuple[Variable, ...]:
        """What TransformerEngine reads under Megatron; empty for FSDP2."""
        if not self.fp8.megatron:
            return ()
        asked = f"fp8.recipe.backward={self.fp8.recipe.backward} with {self.fp8.recipe.scale_format} scales"
        needed = {megatron_environment.BACKWARD_VARIABLE: None, **megatron_environment.environment(self.fp8)}
        return tuple(Variable(name, value, asked) for name, value in needed.items())

    @cached_property
    def vllm_variables(self) -> tuple[Variable, ...]:
        """What vLLM's processes read beside their arguments; empty where no kernel is chosen."""
        if not self.judges_kernels:
            return ()
        asked = f"fp8.rollout_kernel={self.fp8.rollout_kernel} with {self.fp8.recipe.scale_format} scales"
        return tuple(Variable(name, value, asked) for name, value in environment(self.fp8, self.machine).items())

    @property
    def model_key(self) -> str:
        """The key of ``actor_rollout_ref.model`` that names the model's configuration."""
        return "hf_config_path" if self.plain("rollout.fp8_model")["hf_config_path"] else "path"

    @cached_property
    def hf_config(self) -> Any:
        """The Hugging Face configuration of the model.

        Raises:
            ConfigError: there is none to be read.
        """
        node, key = self.plain("rollout.fp8_model"), self.model_key
        path, fix = f"actor_rollout_ref.model.{key}", f"set actor_rollout_ref.model.{key} to a model"
        if not isinstance(node[key], str):
            raise ConfigError(f"{path}={node[key]!r}", "not a path", fix)
        try:
            return load_config(node)
        except (OSError, ValueError) as error:
            found = f"no readable model configuration there ({str(error).splitlines()[0]})"
            raise ConfigError(f"the layers of {path}={node[key]}", found, fix) from error

    @cached_property
    def layers(self) -> Layers:
        """Which layers are FP8.

        Raises:
            ConfigError: the model is no causal one, or ``fp8.recipe.exclude`` is wrong.
        """
        converted, kept, shapes = split_layers(self.hf_config, self.fp8.layer_filter)
        return Layers(self.hf_config, converted, kept, shapes)


def is_group(node: Any) -> bool:
    """Whether a node is a composed group; without the group on Hydra's search path it is a plain string."""
    return isinstance(node, DictConfig)


def read(config: DictConfig) -> Run:
    """The run that a composed configuration asks for; the first of the three steps."""
    unreadable: list[Refusal] = []

    def parsed(group: str, parse: Callable) -> Any:
        node = get(config, group)
        try:
            return None if node is None else parse(node)
        except Fp8Error as error:
            unreadable.append(Refusal.of(error))
            return None

    fp8, correction = parsed("fp8", Fp8Settings.parse), parsed("is_correction", CorrectionSettings.parse)
    return Run(config, fp8, correction, tuple(unreadable), probe())
