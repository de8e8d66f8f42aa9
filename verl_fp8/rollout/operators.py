"""vLLM's quantise-and-multiply as operators of torch's library, so that torch.compile sees one node each."""

import torch

from verl_fp8.numerics import quantize, scaled_mm
from verl_fp8.numerics.quantize import QuantizedTensor
from verl_fp8.numerics.recipe import Recipe


@torch.library.custom_op("verl_fp8::quantize_rows", mutates_args=())
def _quantize_rows(
    x: torch.Tensor, n: int, scale_format: str, eps: float, stride: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [M, K] and scales [M, ceil(K/n)], the latter row-major for stride 0, else with strides (1, stride)."""
    scale_inv = _row_scales(x, n, stride)
    if x.is_cuda:
        from verl_fp8.numerics import quantize_triton

        data = quantize_triton.quantize_rows(x, n, scale_format=scale_format, eps=eps, scale_inv=scale_inv).data
    else:
        quantized = quantize.quantize(x, (1, n), scale_format=scale_format, eps=eps, check_finite=False)
        data = quantized.data
        scale_inv.copy_(quantized.scale_inv)
    return data, scale_inv


@_quantize_rows.register_fake
def _(x, n, scale_format, eps, stride):
    return torch.empty_like(x, dtype=quantize.FP8_DTYPE), _row_scales(x, n, stride)


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
