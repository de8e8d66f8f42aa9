"""Entry point of the ``vllm.general_plugins`` group: runs in every vLLM process before the model is built."""

import os


def register() -> None:
    """Make the CPU rollout possible where ``VERL_PLATFORM=cpu``; on GPU nothing is touched without the ``fp8`` switch."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from verl_fp8 import vllm_cpu

        vllm_cpu.install()
