"""vLLM on CPU: a true W8A8 block kernel on our quantiser, and live weights in unquantised layers.

The kernel goes into vLLM's own kernel table (vllm/model_executor/kernels/linear/__init__.py, _POSSIBLE_FP8_BLOCK_KERNELS);
``register_linear_kernel`` there has no block kind. vLLM's only CPU block kernel needs AMX and quantises no activations.
"""

import torch
import wrapt

from verl_fp8 import exact, vendored, vllm_moe_cpu
from verl_fp8.contract import require
from verl_fp8.numerics import QuantizedTensor, gemm, quantize
from verl_fp8.rollout import DEQUANTIZED
from verl_fp8.vllm_arguments import settings_of


def install() -> None:
    """Idempotent: vLLM loads general plugins once a process but may call the function again."""
    require("vllm_cpu")
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers import utils
    from vllm.platforms import PlatformEnum

    kernel = reference_kernel()
    table = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if all(k.__name__ != kernel.__name__ for k in table):
        table.insert(0, kernel)
    name = "dispatch_cpu_unquantized_gemm"
    if not isinstance(utils.dispatch_cpu_unquantized_gemm, wrapt.FunctionWrapper) and not vendored.carries(utils, name):
        wrapt.wrap_function_wrapper(utils, name, _live_weight)
    vllm_moe_cpu.install()


def _live_weight(wrapped, instance, args, kwargs):
    # vLLM packs 2-D weights for oneDNN and empties layer.weight: the first sync then fails, and lm_head silently keeps
    # the old values. F.linear on the live parameter is as fast at rollout sizes and always current.
    layer = args[0] if args else kwargs["layer"]
    if layer.weight.ndim == 2:
        layer.cpu_linear = live_linear(layer)
        return None
    return wrapped(*args, **kwargs)


def live_linear(layer: torch.nn.Module):
    """The product (x, weight, bias) of an unquantised layer, on the parameter as it is when called."""
    return _exact_dense(layer) if _exact_run() else torch.nn.functional.linear


def _exact_run() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    settings = settings_of(get_current_vllm_config_or_none())
    return settings is not None and settings.exact


def _exact_dense(layer: torch.nn.Module):
    """The exact mode's product for one unquantised layer: logits in float32, anything else in the input's dtype."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    head = isinstance(layer, VocabParallelEmbedding)
    return lambda x, weight, bias: exact.dense(x, weight, bias, torch.float32 if head else x.dtype)


def reference_kernel() -> type:
    """The kernel class; built on call, since its base can only be imported inside vLLM's processes."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import current_platform

    class ReferenceFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
        """y = Q(x) @ Q(W).T by verl_fp8.numerics, the trainer's own function; blocks of any size."""

        @classmethod
        def is_supported(cls, compute_capability=None):
            return (True, None) if current_platform.is_cpu() else (False, "runs on CPU only.")

        @classmethod
        def can_implement(cls, config):
            if settings_of(get_current_vllm_config()) is None:
                return False, "serves verl_fp8's rollout only."
            return super().can_implement(config)

        def __init__(self, config):
            super().__init__(config)
            settings = settings_of(get_current_vllm_config())
            self.recipe = settings.recipe
            self.accumulate = exact.WIDE if settings.exact else torch.float32

        def process_weights_after_loading(self, layer):
            """Nothing: the parameters stay as loaded, so that every sync lands in them."""

        def apply_weights(self, layer, x, bias=None, **kwargs):
            weight = layer.__dict__.get(DEQUANTIZED)
            if weight is None:
                # Once a sync: dequantising on every call costs three times the GEMM. The extension drops it.
                codes = QuantizedTensor(layer.weight.data, layer.weight_scale_inv.data, self.recipe.weight_block)
                weight = layer.__dict__[DEQUANTIZED] = codes.dequantize(self.accumulate)
            flat = x.reshape(-1, x.shape[-1])
            quantized = quantize(
                flat,
                self.recipe.activation_block,
                scale_format=self.recipe.scale_format,
                eps=self.recipe.eps,
                check_finite=False,
            )
            y = gemm(quantized, weight, x.dtype, accumulate=self.accumulate)
            if bias is not None:
                y = y + bias
            return y.reshape(*x.shape[:-1], y.shape[-1])

        def apply_block_scaled_mm(self, A, B, As, Bs):
            raise NotImplementedError("apply_weights does the whole product")

    return ReferenceFp8BlockKernel
