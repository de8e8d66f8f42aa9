"""The three GEMMs of a linear layer as ``torch.nn.functional.scaled_mm`` takes them: operands, layouts, scales."""

from typing import Any

import torch
from torch import nn

from verl_fp8.errors import DataError
from verl_fp8.numerics import quantize
from verl_fp8.numerics.quantize import QuantizedTensor
from verl_fp8.numerics.recipe import GPU_BLOCK, Recipe


def gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    """a @ b.T on a Hopper GPU, [M, N] in ``out_dtype``; what :func:`verl_fp8.numerics.linear.gemm` defines."""
    rows, columns = a.shape[0], b.shape[0]
    if 0 in (*a.shape, columns):
        return torch.zeros((rows, columns), dtype=out_dtype, device=a.data.device)
    y = nn.functional.scaled_mm(**arguments(a, b), output_dtype=out_dtype, use_fast_accum=False)
    return y if y.shape == (rows, columns) else y[:rows, :columns].contiguous()


def arguments(a: QuantizedTensor, b: QuantizedTensor) -> dict[str, Any]:
    """Operands of ``scaled_mm`` for a @ b.T, laid out as the kernels demand; copies only what is not so already.

    Ragged sizes are padded with zero codes: K to whole blocks, M to 4 (strides of 16 bytes in the scales), N to 16
    (rows of 16 bytes) or, for 128x128, to whole blocks. The product then has the padded [M, N].

    Args:
        a: [M, K] in blocks of 1x128.
        b: [N, K] in blocks of 128x128 or 1x128.

    Raises:
        DataError: other blocks, or operands that do not fit.
    """
    from torch.nn.functional import ScalingType

    recipes = {(1, 128): ScalingType.BlockWise1x128, GPU_BLOCK: ScalingType.BlockWise128x128}
    if a.block != (1, 128) or b.block not in recipes or a.shape[1] != b.shape[1]:
        raise DataError(
            "a product [M, K] x [N, K] of FP8 codes in blocks of 1x128 by 128x128 or 1x128",
            f"{tuple(a.shape)} in {a.block} by {tuple(b.shape)} in {b.block}",
            "quantise both along the contracted dimension",
        )
    square = b.block == GPU_BLOCK
    a, b = _whole(a, 4), _whole(b, 128 if square else 16)
    return {
        "mat_a": a.data,
        "scale_a": outer_major(a.scale_inv),
        "scale_recipe_a": recipes[a.block],
        "mat_b": b.data.t(),
        "scale_b": block_scales(b.scale_inv) if square else outer_major(b.scale_inv),
        "scale_recipe_b": recipes[b.block],
    }


def _whole(q: QuantizedTensor, rows: int) -> QuantizedTensor:
    """The same operand with contiguous codes, its rows padded to a multiple of ``rows`` and its columns to one of
    128."""
    down, right = -q.shape[0] % rows, -q.shape[1] % 128
    if not down and not right:
        return QuantizedTensor(q.data.contiguous(), q.scale_inv, q.block)
    data = nn.functional.pad(q.data.view(torch.uint8), (0, right, 0, down)).view(q.data.dtype)
    # A square block that grows keeps its scale; blocks of one row need one for each new row.
    more = down if q.block[0] == 1 else 0
    return QuantizedTensor(data, nn.functional.pad(q.scale_inv, (0, 0, 0, more), value=1.0), q.block)


def outer_major(scale_inv: torch.Tensor) -> torch.Tensor:
    """[M, K/128] scales with strides (1, M), whatever they were."""
    strides = (1, scale_inv.shape[0])
    if scale_inv.stride() == strides:
        return scale_inv
    # Not .t().contiguous().t(): where M or K/128 is 1, that keeps any stride.
    out = torch.empty_strided(scale_inv.shape, strides, dtype=scale_inv.dtype, device=scale_inv.device)
    return out.copy_(scale_inv)


def block_scales(scale_inv: torch.Tensor) -> torch.Tensor:
    """[N/128, K/128] scales -> [K/128 padded to a multiple of 4, N/128] with stride 1 along the first dimension."""
    rows, blocks = scale_inv.shape
    padded = blocks + -blocks % 4
    if scale_inv.stride() == (padded, 1):
        return scale_inv.t()
    out = scale_inv.new_ones((rows, padded))  # the padding is never read: the GEMM's K ends before it
    out[:, :blocks] = scale_inv
    return out.t()


def quantize_rows(x: torch.Tensor, recipe: Recipe) -> QuantizedTensor:
    """x in blocks of 1x128: Triton on a GPU, numerics.quantize elsewhere; the same bits."""
    n, options = recipe.activation_block[1], _options(recipe)
    if x.is_cuda:
        from verl_fp8.numerics import quantize_triton

        return quantize_triton.quantize_rows(x, n, **options)
    return quantize.quantize_activation(x, recipe)


def quantize_both(
    x: torch.Tensor, recipe: Recipe, *, along_rows: bool = True
) -> tuple[QuantizedTensor | None, QuantizedTensor]:
    """x and x transposed, each in blocks of 1x128 (see :func:`verl_fp8.numerics.quantize_triton.quantize_both`)."""
    n, options = recipe.activation_block[1], _options(recipe)
    if x.is_cuda:
        from verl_fp8.numerics import quantize_triton

        return quantize_triton.quantize_both(x, n, along_rows=along_rows, **options)
    transposed = quantize.quantize(x, (n, 1), check_finite=False, **options).t()
    transposed = QuantizedTensor(transposed.data.contiguous(), transposed.scale_inv, transposed.block)
    return (quantize_rows(x, recipe) if along_rows else None), transposed


def weight_operand(weight: torch.Tensor, recipe: Recipe, *, transposed: bool = False) -> QuantizedTensor:
    """A weight in blocks of 128x128, or the same codes and scales transposed with contiguous codes."""
    options = _options(recipe)
    if weight.is_cuda:
        from verl_fp8.numerics import quantize_triton

        return quantize_triton.quantize_blocks(weight, recipe.weight_block, transposed=transposed, **options)
    quantized = quantize.quantize(weight, recipe.weight_block, check_finite=False, **options)
    return quantized.t() if transposed else quantized


def _options(recipe: Recipe) -> dict[str, Any]:
    return {"scale_format": recipe.scale_format, "eps": recipe.eps}
