"""Makes this package known to verl in the current process. Each function is idempotent and raises; nothing warns."""

from verl_fp8 import vendored
from verl_fp8.contract import require


def engines() -> None:
    """Register the FP8 FSDP2 engine under its own backend name, for CUDA and CPU."""
    from verl_fp8 import engine

    require("engine")
    engine.register()


def rollout() -> None:
    """Let verl's rollout table point at our server adapter, whose weight sync cannot block for ever."""
    from verl.workers.rollout import base

    require("register")
    if not vendored.carries(base, "weight_sync"):
        base._ROLLOUT_REGISTRY[("vllm", "async")] = "verl_fp8.adapter.Fp8ServerAdapter"


def stage() -> None:
    """Attach the correction stage and the FP8 metrics to verl's V1 trainer."""
    from verl_fp8 import stage as stage_module

    require("stage")
    stage_module.attach()
