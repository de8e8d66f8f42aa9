"""Puts our classes where verl looks for them, in the current process.

Each function may be called again without effect, and raises where it cannot do its work. Nothing warns.
"""

from verl_fp8.errors import ContractError
from verl_fp8.upstream import patched
from verl_fp8.upstream.contract import require


def register_fsdp_engine() -> None:
    """Register the FP8 FSDP2 engine under its own backend name, for CUDA and CPU."""
    from verl_fp8.trainer import engine_fsdp

    require("trainer.engine_fsdp")
    engine_fsdp.register()


def register_megatron_engine() -> None:
    """Register the FP8 Megatron engine under its own backend name.

    The driver comes here too, and may be a machine without Megatron. So a stand-in is registered, and Megatron is
    imported when a worker builds the engine.
    """
    from verl.workers.engine.base import BaseEngine, EngineRegistry

    from verl_fp8.switches.settings import MEGATRON_BACKEND

    require("hooks.register")
    if MEGATRON_BACKEND in EngineRegistry._engines.get("language_model", {}):
        return

    class Fp8MegatronEngine(BaseEngine):
        """Stands in for the engine: building one builds the real one."""

        def __new__(cls, *args, **kwargs):
            try:
                from verl_fp8.trainer.engine_megatron import Fp8MegatronEngineWithLMHead
            except ImportError as error:
                raise ContractError(
                    "+fp8=unified_megatron",
                    f"Megatron does not load in this worker: {error}",
                    "install megatron-core, Megatron-Bridge and TransformerEngine on every node",
                ) from error
            return Fp8MegatronEngineWithLMHead(*args, **kwargs)

    EngineRegistry.register(model_type="language_model", backend=MEGATRON_BACKEND)(Fp8MegatronEngine)


def register_server_adapter() -> None:
    """Let verl's rollout table name our server adapter, whose weight sync cannot block for ever."""
    from verl.workers.rollout import base

    require("hooks.register")
    if not patched.carries(base, "weight_sync"):
        base._ROLLOUT_REGISTRY[("vllm", "async")] = "verl_fp8.sync.sender.Fp8ServerAdapter"


def attach_stage() -> None:
    """Attach the correction stage and the FP8 metrics to verl's V1 trainer."""
    from verl_fp8.correction import stage

    require("correction.stage")
    require("correction.reweight")
    stage.attach()
