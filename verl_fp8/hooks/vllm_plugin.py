"""Entry point of the ``vllm.general_plugins`` group: runs in every vLLM process before the model is built."""

from verl_fp8.upstream.platform import cpu_platform


def register() -> None:
    """Make the CPU rollout possible with ``VERL_PLATFORM=cpu``. On CUDA, register what acts only with ``fp8``."""
    if cpu_platform():
        from verl_fp8.rollout import linear_cpu

        linear_cpu.install_linear_cpu()
        return
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        from verl_fp8.rollout import linear_gpu

        linear_gpu.install_linear_gpu()
