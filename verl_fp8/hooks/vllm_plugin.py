"""Entry point of the ``vllm.general_plugins`` group: runs in every vLLM process before the model is built."""

import os


def register() -> None:
    """Make the CPU rollout possible where ``VERL_PLATFORM=cpu``; on CUDA register what acts with the ``fp8`` switch only."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from verl_fp8.rollout import linear_cpu

        linear_cpu.install()
        return
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        from verl_fp8.rollout import linear_gpu

        linear_gpu.install()
