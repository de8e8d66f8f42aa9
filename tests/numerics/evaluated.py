"""scaled_mm without a Hopper GPU: an evaluation of its documented meaning.

The kernels exist on compute capability 9.x only; tests/gpu runs them. :func:`evaluate` accepts exactly the layouts that
ATen/native/cuda/ScaledBlas.cpp accepts and multiplies in float64; torch's own meta kernel judges the same arguments.
"""

import torch
from torch import nn
from torch.nn.functional import ScalingType

from verl_fp8.numerics import linear
from verl_fp8.numerics.quantize import QuantizedTensor


def ceil(size, unit=128):
    """Blocks that cover a size."""
    return -(-size // unit)


def evaluate(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, *, output_dtype=torch.bfloat16, use_fast_accum=False
):
    """torch.nn.functional.scaled_mm by its documentation: mm(a, b) with each operand times its decoding scales."""
    (m, k), n = mat_a.shape, mat_b.shape[1]
    assert mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn
    assert not use_fast_accum  # TransformerEngine's split accumulator
    # cuBLASLt: rows of 16 bytes, scale columns of 16 bytes.
    assert k % 16 == 0
    assert n % 16 == 0
    assert m % 4 == 0
    assert mat_a.stride() == (k, 1)
    assert mat_b.stride() == (1, k)
    assert scale_a.dtype == scale_b.dtype == torch.float32
    # _scaled_block1x128_block1x128 and _scaled_block1x128_block128x128
    assert scale_recipe_a == ScalingType.BlockWise1x128
    assert scale_a.shape == (m, ceil(k))
    assert scale_a.stride() == (1, m)
    if scale_recipe_b == ScalingType.BlockWise1x128:
        assert scale_b.shape == (n, ceil(k))
        assert scale_b.stride() == (1, n)
        b = QuantizedTensor(mat_b.t(), scale_b, (1, 128))
    else:
        assert scale_recipe_b == ScalingType.BlockWise128x128
        padded = ceil(ceil(k), 4) * 4
        assert scale_b.shape == (padded, ceil(n))
        assert scale_b.stride() == (1, padded)
        b = QuantizedTensor(mat_b.t(), scale_b[: ceil(k)].t(), (128, 128))
    return linear.gemm(QuantizedTensor(mat_a, scale_a, (1, 128)), b, output_dtype, accumulate=torch.float64)


def evaluate_scaled_mm(monkeypatch) -> None:
    """scaled_mm by :func:`evaluate`, and float64 sums in the reference."""
    monkeypatch.setattr(nn.functional, "scaled_mm", evaluate)
    monkeypatch.setattr(linear, "matmul", lambda a, b, dtype: (a.double() @ b.double()).to(dtype))
