"""verl's configuration classes with ours in them: the ``_target_`` values the Hydra groups set.

verl builds them on the driver in ``validate_config`` (before Ray starts), in the task runner, in every worker of the
trainer and in every vLLM server. So :mod:`verl_fp8.hooks.register` acts in exactly the processes that need it, whatever
the user's own ``model.external_lib`` is. A process that cannot import this package dies.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    HFModelConfig,
    McoreActorConfig,
    McoreEngineConfig,
    RolloutConfig,
)

from verl_fp8.errors import ConfigError
from verl_fp8.hooks import leftovers, register
from verl_fp8.switches.settings import BACKEND, MEGATRON_BACKEND, Fp8Settings
from verl_fp8.upstream.contract import require


class _OnTheDriver:
    """What the driver does when verl validates the actor's configuration, which it does once a start, before Ray."""

    def validate(self, n_gpus: int, train_batch_size: int, model_config: DictConfig | None = None) -> None:
        """Judge the whole configuration, start watching for leftovers, then validate as verl does.

        Args:
            model_config: ``actor_rollout_ref.model`` (verl/utils/config.py), a node of the whole tree.

        Raises:
            ConfigError: the node has no parents, or a rule refuses the run.
        """
        from verl_fp8.rules.run import conclude_start

        if not isinstance(model_config, DictConfig):
            raise ConfigError(
                "the checks of fp8 and is_correction on the whole configuration",
                f"a {type(model_config).__name__} without its parents",
                "start verl through verl.trainer.main_ppo",
            )
        # Usually the wrapper of validate_config (hooks/verl_plugin.py) has just asked; nothing is then judged again.
        conclude_start(model_config._get_root())
        # The one thing that is started here, and it comes after every rule.
        leftovers.watch()
        super().validate(n_gpus, train_batch_size, model_config)


@dataclass
class CheckedFSDPActorConfig(_OnTheDriver, FSDPActorConfig):
    """verl's FSDP actor; with an :class:`Fp8EngineConfig` inside it selects our engine instead of verl's."""

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.fsdp_config, Fp8EngineConfig):
            register.register_fsdp_engine()
            # verl copies the strategy onto the engine and looks the engine class up by it. Ours has a name of its own.
            # So actor.strategy=fsdp2 on the command line still means our engine, and stock fsdp2 stays stock.
            if self.strategy != "fsdp2":
                raise ConfigError(
                    "+fp8 with FSDP",
                    f"actor_rollout_ref.actor.strategy={self.strategy}",
                    "remove that override or set actor_rollout_ref.actor.strategy=fsdp2",
                )
            object.__setattr__(self.engine, "strategy", BACKEND)


@dataclass
class CheckedMcoreActorConfig(_OnTheDriver, McoreActorConfig):
    """verl's Megatron actor; with an :class:`Fp8McoreEngineConfig` inside it selects our engine instead of verl's."""

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.megatron, Fp8McoreEngineConfig):
            register.register_megatron_engine()
            object.__setattr__(self.engine, "strategy", MEGATRON_BACKEND)


def actor_config(**kwargs: Any) -> FSDPActorConfig | McoreActorConfig:
    """``_target_`` of actor and reference: verl's class for the strategy, with the driver's checks.

    Raises:
        ConfigError: an engine this package has not been tried on.
    """
    require("hooks.targets")
    strategy = kwargs.get("strategy")
    fsdp, megatron = kwargs.get("fsdp_config"), kwargs.get("megatron")
    if isinstance(fsdp, Fp8EngineConfig) and megatron is not None:
        raise ConfigError(
            "+fp8=unified, rollout or bf16, which are for FSDP2",
            "model_engine=megatron",
            "use +fp8=unified_megatron, or remove model_engine=megatron",
        )
    if isinstance(megatron, Fp8McoreEngineConfig) and fsdp is not None:
        raise ConfigError(
            "+fp8=unified_megatron",
            f"actor_rollout_ref.actor.strategy={strategy}",
            "set model_engine=megatron, or use +fp8=unified",
        )
    if megatron is not None:
        return CheckedMcoreActorConfig(**kwargs)
    if fsdp is not None and strategy in ("fsdp", "fsdp2"):
        return CheckedFSDPActorConfig(**kwargs)
    raise ConfigError(
        "fp8 or is_correction",
        f"actor_rollout_ref.actor.strategy={strategy}",
        "use actor_rollout_ref.actor.strategy=fsdp2 (both switches) or model_engine=megatron (is_correction)",
    )


@dataclass
class Fp8EngineConfig(FSDPEngineConfig):
    """verl's FSDP engine configuration and the ``fp8`` node."""

    fp8: Any = None

    def settings(self, capability: tuple[int, int] | None = None) -> Fp8Settings:
        """The parsed ``fp8`` node."""
        return Fp8Settings.parse(self.fp8, capability=capability)


@dataclass
class Fp8McoreEngineConfig(McoreEngineConfig):
    """verl's Megatron engine configuration and the ``fp8`` node."""

    fp8: Any = None

    def settings(self, capability: tuple[int, int] | None = None) -> Fp8Settings:
        """The parsed ``fp8`` node."""
        return Fp8Settings.parse(self.fp8, capability=capability)


@dataclass
class ModelConfig(HFModelConfig):
    """verl's model configuration. The task runner builds it before the first step: the AIS stage is attached there."""

    def __post_init__(self):
        register.attach_stage()
        super().__post_init__()


@dataclass
class Fp8RolloutConfig(RolloutConfig):
    """verl's rollout configuration; fills ``engine_kwargs.vllm`` from the ``fp8`` node and the model's own layers."""

    fp8: Any = None
    fp8_model: Any = None

    def __post_init__(self):
        super().__post_init__()
        register.register_server_adapter()
        from verl_fp8.rollout.arguments import fp8_arguments

        kwargs = dict(self.engine_kwargs)
        kwargs["vllm"] = fp8_arguments(self.fp8, self.fp8_model, dict(kwargs.get("vllm") or {}))
        self.engine_kwargs = kwargs
