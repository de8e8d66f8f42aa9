"""vLLM on a GPU: the trainer's quantiser and, with ``fp8.rollout_kernel=torch``, the trainer's GEMM.

Three registrations, in every vLLM process (:mod:`verl_fp8.hooks.vllm_plugin`). Without the ``fp8`` node in vLLM's
configuration each of them leaves stock behaviour alone.

* :func:`quantizer`: a replacement of ``QuantFP8``, which quantises the activations of vLLM's FP8 linears, through
  ``CustomOp.register_oot``. Stock vLLM divides by amax/448 where the recipe multiplies by 448/amax, and floors amax.
* :func:`scaled_mm_kernel`: a block kernel that runs :mod:`verl_fp8.trainer.scaled_mm`, in vLLM's kernel table under the
  backend name ``torch``. vLLM's own kernel of that name does the same product, but came after 0.24.
* :func:`_keep_power_of_two`: DeepGEMM's post-processing requantises every weight for UE8M0 scales
  (quantization/utils/fp8_utils.py, requant_weight_ue8m0_inplace), with a floor of 1e-4 on amax. Weights that already
  have power-of-two scales stay as the trainer sent them.

Mixture-of-experts layers quantise elsewhere: :mod:`verl_fp8.rollout.experts_gpu`, installed from here.

Quantiser and product are torch custom operators, opaque to torch.compile: no pass fuses into them or around them.
"""

import torch
import wrapt

from verl_fp8.errors import ContractError
from verl_fp8.rollout import operators  # noqa: F401  (registers torch.ops.verl_fp8)
from verl_fp8.rollout.serving import SERVED, settings_served
from verl_fp8.switches.hardware import probe
from verl_fp8.upstream.contract import require

_REQUANT = "requant_weight_ue8m0_inplace"
_MANTISSA = 0x7FFFFF


def install_linear_gpu() -> None:
    """Idempotent: vLLM loads general plugins once a process but may call the function again."""
    require("rollout.linear_gpu")
    require("rollout.serving")
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.platforms import PlatformEnum

    other = op_registry_oot.get(QuantFP8.__name__)
    if other is None:
        replacement = CustomOp.register_oot(name=QuantFP8.__name__)(quantizer())
        # register_oot renames it; custom_ops of a compilation config know it under the name it had.
        replacement.name = QuantFP8.name
    elif other.__name__ != "UnifiedQuantFP8":
        raise ContractError(
            "vLLM's QuantFP8 for verl_fp8's quantiser", f"{other} in its place", "remove the other vLLM plugin"
        )
    table = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    if all(k.__name__ != "UnifiedScaledMMKernel" for k in table):
        kernel = scaled_mm_kernel()
        table.insert(0, kernel)
        linear._LINEAR_BACKEND_KERNEL_MAP["torch"].add(kernel)
    if not isinstance(getattr(fp8_utils, _REQUANT), wrapt.FunctionWrapper):
        wrapt.wrap_function_wrapper(fp8_utils, _REQUANT, _keep_power_of_two)
    from verl_fp8.rollout import experts_gpu

    experts_gpu.install_experts_gpu()


def quantizer() -> type:
    """The replacement class; built on call, since its base can only be imported inside vLLM's processes."""
    from vllm.model_executor.layers.quantization import input_quant_fp8
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    class UnifiedQuantFP8(QuantFP8):
        """``QuantFP8`` whose dynamic group quantisation is the recipe's, in the scale layouts the caller asked for.

        DeepGEMM's packed UE8M0 scales stay with the stock kernel, whose codes are the recipe's already.
        """

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            settings = settings_served()
            if settings is None or self.static or not self.is_group_quant or self._packed():
                return
            self.recipe = settings.recipe
            # Whether enabled as a custom op or not: neither the stock kernel nor its compiled torch version.
            self._forward_method = self.unified

        def _packed(self) -> bool:
            fmt = input_quant_fp8.DeepGemmQuantScaleFMT
            return self.use_ue8m0 and self.use_deep_gemm_supported and fmt.from_oracle() == fmt.UE8M0

        def unified(self, x, scale=None, scale_ub=None, use_triton=False):
            """[M, K] -> codes [M, K] and float32 scales [M, K/128]; ``use_triton`` chooses among stock kernels only."""
            rows = x.shape[0]
            stride = rows if self.column_major_scales else 0
            if self.column_major_scales and self.tma_aligned_scales:
                stride = rows + -rows % 4  # DeepGEMM's get_tma_aligned_size: 16 bytes
            recipe = self.recipe
            return torch.ops.verl_fp8.quantize_rows(x, self.group_size, recipe.scale_format, recipe.eps, stride)

    return UnifiedQuantFP8


def scaled_mm_kernel() -> type:
    """The kernel class; built on call, as :func:`quantizer`."""
    from vllm.model_executor.kernels.linear.scaled_mm import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import current_platform

    class UnifiedScaledMMKernel(Fp8BlockScaledMMLinearKernel):
        """y = Q(x) @ Q(W).T by verl_fp8.trainer.scaled_mm, as the trainer's ``torch`` backend computes it."""

        @classmethod
        def is_supported(cls, compute_capability=None):
            if not current_platform.is_cuda():
                return False, "requires CUDA."
            # vLLM passes 10 * major + minor.
            hopper = compute_capability // 10 == 9 if compute_capability else probe().capability[0] == 9
            return (True, None) if hopper else (False, "requires compute capability 9.x (Hopper).")

        @classmethod
        def can_implement(cls, config):
            if settings_served() is None:
                return False, "serves verl_fp8's rollout only."
            return super().can_implement(config)

        def __init__(self, config):
            super().__init__(config)
            self.recipe = settings_served().recipe

        def process_weights_after_loading(self, layer):
            """Nothing: the parameters stay as loaded, so that every sync lands in them."""

        def apply_weights(self, layer, x, bias=None, **kwargs):
            y = torch.ops.verl_fp8.block_linear(
                x.reshape(-1, x.shape[-1]),
                layer.weight,
                layer.weight_scale_inv,
                self.recipe.scale_format,
                self.recipe.eps,
            )
            if bias is not None:
                y = y + bias
            return y.to(self.config.out_dtype).reshape(*x.shape[:-1], y.shape[-1])

        def apply_block_scaled_mm(self, A, B, As, Bs):
            raise NotImplementedError("apply_weights does the whole product")

    return UnifiedScaledMMKernel


def _keep_power_of_two(wrapped, instance, args, kwargs):
    scale = args[1] if len(args) > 1 else kwargs["weight_scale"]
    if SERVED and bool((scale.contiguous().view(torch.int32) & _MANTISSA == 0).all()):
        return None
    return wrapped(*args, **kwargs)
