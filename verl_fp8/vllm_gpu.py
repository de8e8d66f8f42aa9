"""vLLM on a GPU: the trainer's quantiser and, with ``fp8.rollout_kernel=torch``, the trainer's GEMM.

Three registrations, in every vLLM process (:mod:`verl_fp8.vllm_plugin`). Without the ``fp8`` node in vLLM's
configuration each of them leaves stock behaviour alone.

* :func:`quantizer`: a replacement of ``QuantFP8``, which quantises the activations of vLLM's FP8 linears, through
  ``CustomOp.register_oot``. Stock vLLM divides by amax/448 where the recipe multiplies by 448/amax, and floors amax.
* :func:`scaled_mm_kernel`: a block kernel that runs :mod:`verl_fp8.scaled_mm`, in vLLM's kernel table under the backend
  name ``torch``. vLLM's own kernel of that name does the same product, but came after 0.24.
* :func:`_keep_power_of_two`: DeepGEMM's post-processing requantises every weight for UE8M0 scales
  (quantization/utils/fp8_utils.py, requant_weight_ue8m0_inplace), with a floor of 1e-4 on amax. Weights that already
  have power-of-two scales stay as the trainer sent them.

Mixture-of-experts layers quantise elsewhere: :mod:`verl_fp8.vllm_moe_gpu`, installed from here.

Quantiser and product are torch custom operators, opaque to torch.compile: no pass fuses into them or around them.
"""

import os

import torch
import wrapt

from verl_fp8 import numerics, scaled_mm
from verl_fp8.contract import require
from verl_fp8.errors import ContractError
from verl_fp8.hardware import probe
from verl_fp8.numerics import QuantizedTensor
from verl_fp8.recipe import Recipe
from verl_fp8.settings import Fp8Settings
from verl_fp8.vllm_arguments import environment, settings_of

_REQUANT = "requant_weight_ue8m0_inplace"
_MANTISSA = 0x7FFFFF


def install() -> None:
    """Idempotent: vLLM loads general plugins once a process but may call the function again."""
    require("vllm_gpu")
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
        raise ContractError("vLLM's QuantFP8 for verl_fp8's quantiser", f"{other} in its place", "remove the other vLLM plugin")
    table = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    if all(k.__name__ != "UnifiedScaledMMKernel" for k in table):
        kernel = scaled_mm_kernel()
        table.insert(0, kernel)
        linear._LINEAR_BACKEND_KERNEL_MAP["torch"].add(kernel)
    if not isinstance(getattr(fp8_utils, _REQUANT), wrapt.FunctionWrapper):
        wrapt.wrap_function_wrapper(fp8_utils, _REQUANT, _keep_power_of_two)
    from verl_fp8 import vllm_moe_gpu

    vllm_moe_gpu.install()


def _settings() -> Fp8Settings | None:
    """The fp8 node of the vLLM that is being built, None for one that is not ours."""
    from vllm.config import get_current_vllm_config_or_none

    settings = settings_of(get_current_vllm_config_or_none())
    if settings is not None:
        _check_environment(settings)
        _serves.add(settings)
    return settings


_serves: set[Fp8Settings] = set()  # of this process; forwards and refits run outside vLLM's configuration context


def serve(settings: Fp8Settings) -> None:
    """Called by the worker before it builds the model: this process runs FP8 layers of these settings.

    Sets the variables of :func:`~verl_fp8.vllm_arguments.environment` that are not set, as they are where the driver has no GPU
    to resolve ``auto`` by; vLLM reads them when it builds the layers.

    Raises:
        ContractError: one of them has another value.
    """
    for name, value in environment(settings, probe()).items():
        os.environ.setdefault(name, value)
    _check_environment(settings)
    _serves.add(settings)


def serving() -> Recipe | None:
    """The recipe of the FP8 model this process runs; None in a vLLM that is not ours.

    Raises:
        ContractError: there are two.
    """
    recipes = {settings.recipe for settings in _serves}
    if len(recipes) > 1:
        raise ContractError("one FP8 recipe in a vLLM process", f"{len(recipes)}", "start each vLLM in a process of its own")
    return next(iter(recipes), None)


def _check_environment(settings: Fp8Settings) -> None:
    # What has no argument of its own.
    name = "VLLM_USE_DEEP_GEMM_E8M0"
    wanted = environment(settings, probe()).get(name)
    found = os.environ.get(name, "1")  # vllm/envs.py
    if wanted is not None and found != wanted:
        raise ContractError(
            f"{name}={wanted} for {settings.recipe.scale_format} scales with fp8.rollout_kernel=deep_gemm",
            f"{name}={found} in vLLM's process",
            f"set +ray_kwargs.ray_init.runtime_env.env_vars.{name}={wanted}",
        )


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
            settings = _settings()
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
        """y = Q(x) @ Q(W).T by verl_fp8.scaled_mm, as the trainer's ``torch`` backend computes it."""

        @classmethod
        def is_supported(cls, compute_capability=None):
            if not current_platform.is_cuda():
                return False, "requires CUDA."
            # vLLM passes 10 * major + minor.
            hopper = compute_capability // 10 == 9 if compute_capability else probe().capability[0] == 9
            return (True, None) if hopper else (False, "requires compute capability 9.x (Hopper).")

        @classmethod
        def can_implement(cls, config):
            if _settings() is None:
                return False, "serves verl_fp8's rollout only."
            return super().can_implement(config)

        def __init__(self, config):
            super().__init__(config)
            self.recipe = _settings().recipe

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
    if _serves and bool((scale.contiguous().view(torch.int32) & _MANTISSA == 0).all()):
        return None
    return wrapped(*args, **kwargs)


@torch.library.custom_op("verl_fp8::quantize_rows", mutates_args=())
def _quantize_rows(
    x: torch.Tensor, n: int, scale_format: str, eps: float, stride: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [M, K] and scales [M, ceil(K/n)], the latter row-major for stride 0, else with strides (1, stride)."""
    scale_inv = _row_scales(x, n, stride)
    if x.is_cuda:
        from verl_fp8 import triton_quant

        data = triton_quant.quantize_rows(x, n, scale_format=scale_format, eps=eps, scale_inv=scale_inv).data
    else:
        quantized = numerics.quantize(x, (1, n), scale_format=scale_format, eps=eps, check_finite=False)
        data = quantized.data
        scale_inv.copy_(quantized.scale_inv)
    return data, scale_inv


@_quantize_rows.register_fake
def _(x, n, scale_format, eps, stride):
    return torch.empty_like(x, dtype=numerics.FP8_DTYPE), _row_scales(x, n, stride)


def _row_scales(x: torch.Tensor, n: int, stride: int) -> torch.Tensor:
    rows, blocks = x.shape[0], -(-x.shape[1] // n)
    strides = (1, stride) if stride else (blocks, 1)
    return torch.empty_strided((rows, blocks), strides, dtype=torch.float32, device=x.device)


@torch.library.custom_op("verl_fp8::block_linear", mutates_args=())
def _block_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale_inv: torch.Tensor, scale_format: str, eps: float
) -> torch.Tensor:
    """[M, K] @ codes [N, K].T -> [M, N] in x's dtype."""
    recipe = Recipe(scale_format=scale_format, eps=eps)
    quantized = QuantizedTensor(weight, weight_scale_inv, recipe.weight_block)
    return scaled_mm.gemm(scaled_mm.quantize_rows(x, recipe), quantized, x.dtype)


@_block_linear.register_fake
def _(x, weight, weight_scale_inv, scale_format, eps):
    return x.new_empty((x.shape[0], weight.shape[0]))
