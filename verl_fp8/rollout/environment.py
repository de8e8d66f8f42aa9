"""The environment variables that vLLM's processes need beside their arguments."""

from verl_fp8.switches.hardware import Hardware, resolve_rollout_kernel
from verl_fp8.switches.settings import Fp8Settings


def environment(settings: Fp8Settings, hardware: Hardware) -> dict[str, str]:
    """The variables vLLM's processes need beside their arguments (vllm/envs.py); empty without a GPU or FP8 layers."""
    if hardware.capability is None or settings.layer_filter is None:
        return {}
    kernel = resolve_rollout_kernel(settings.rollout_kernel, settings.recipe, hardware)
    deep_gemm = kernel == "deep_gemm"
    variables = {
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
        # Off, it also keeps the MoE oracle from DeepGEMM.
        "VLLM_USE_DEEP_GEMM": "1" if deep_gemm else "0",
    }
    if deep_gemm:
        variables["VLLM_USE_DEEP_GEMM_E8M0"] = "1" if settings.recipe.scale_format == "pow2" else "0"
    return variables
