"""The quantiser of :mod:`verl_fp8.numerics.quantize` as Triton kernels, bit for bit, for activations (1xn) and weights
(RxC).

Imports Triton: import it inside functions, where a GPU is at hand. What makes the bits equal:

* amax is an integer maximum over the bits without the sign, so NaN and order play no part;
* both divisions are ``tl.div_rn``; Triton's ``/`` is ``div.full.f32``, which is up to 2 ulp off;
* x * s is one float32 product and stays one: nothing is added to it, so nothing can be fused into it;
* the cast is ``cvt.rn.satfinite.e4m3x2.f32``: nearest even, saturating, NaN -> 0x7F.

tests/numerics/test_quantize_triton.py runs the kernels in Triton's interpreter against quantize.py, and compiles them
for sm_90a and sm_100a to see that these very instructions come out. The interpreter's own FP8 cast does not round to
even, so there :func:`_encode` rounds in integers; tests/gpu compares both ways of rounding on the GPU.
"""

import torch
import triton
import triton.language as tl

from verl_fp8.errors import ConfigError, DataError
from verl_fp8.numerics import quantize as reference
from verl_fp8.numerics.quantize import FP8_DTYPE, QuantizedTensor
from verl_fp8.numerics.recipe import SCALE_FORMATS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INFINITY = tl.constexpr(0x7F800000)
_ROWS = 32  # rows a program of the 1xn kernel takes: 4096 values, 32 a thread at n = 128


def quantize(
    x: torch.Tensor,
    block: tuple[int, int],
    *,
    scale_format: str = "fp32",
    eps: float = 0.0,
    check_finite: bool = True,
) -> QuantizedTensor:
    """:func:`verl_fp8.numerics.quantize.quantize`, the same arguments, results and errors, in one pass over ``x``."""
    rows, columns = block
    if rows == 1:
        out = quantize_rows(x, columns, scale_format=scale_format, eps=eps, outer_major=False)
    elif columns == 1:
        out = quantize_both(x, rows, scale_format=scale_format, eps=eps, along_rows=False)[1].t()
        out = QuantizedTensor(out.data.contiguous(), out.scale_inv.contiguous(), block)
    else:
        out = quantize_blocks(x, block, scale_format=scale_format, eps=eps)
    if check_finite and x.numel() and not bool(torch.isfinite(x).all()):
        reference.quantize(x, block, scale_format=scale_format, eps=eps)  # raises, with the place of the value
    return out


def quantize_rows(
    x: torch.Tensor,
    n: int,
    *,
    scale_format: str = "fp32",
    eps: float = 0.0,
    outer_major: bool = True,
    scale_inv: torch.Tensor | None = None,
    hardware_cast: bool | None = None,
) -> QuantizedTensor:
    """Blocks of 1xn along the last dimension; infinities and NaN as in numerics.quantize(check_finite=False).

    Args:
        x: [M, K] bfloat16, float16 or float32.
        n: values that share a scale.
        outer_major: strides (1, M) of the scales, which is what cuBLASLt and CUTLASS read; else (K/n, 1).
        scale_inv: [M, ceil(K/n)] float32 to write the scales to, any strides; instead of ``outer_major``.
        hardware_cast: cast by the GPU's instruction (default on a GPU), or in integers.

    Returns:
        codes [M, K] contiguous, and scales [M, ceil(K/n)].

    Raises:
        DataError, ConfigError: as numerics.quantize.
    """
    x = _prepared(x, (1, n), scale_format)
    rows, columns = x.shape
    data = torch.empty(x.shape, dtype=FP8_DTYPE, device=x.device)
    blocks = triton.cdiv(columns, n)
    if scale_inv is None:
        shape = (blocks, rows) if outer_major else (rows, blocks)
        scale_inv = torch.empty(shape, dtype=torch.float32, device=x.device)
        scale_inv = scale_inv.t() if outer_major else scale_inv
    if x.numel():
        _rows_kernel[(triton.cdiv(rows, _ROWS), blocks)](
            _bits(x), data.view(torch.uint8), scale_inv, rows, columns, x.stride(0), *scale_inv.stride(), eps,
            torch.finfo(x.dtype).max, N=n, WIDTH=triton.next_power_of_2(n), ROWS=_ROWS, POW2=scale_format == "pow2",
            HARDWARE_CAST=_hardware_cast(x, hardware_cast), num_warps=4,
        )  # fmt: skip
    return QuantizedTensor(data, scale_inv, (1, n))


def quantize_both(
    x: torch.Tensor,
    n: int,
    *,
    scale_format: str = "fp32",
    eps: float = 0.0,
    along_rows: bool = True,
    hardware_cast: bool | None = None,
) -> tuple[QuantizedTensor | None, QuantizedTensor]:
    """x in blocks of 1xn, and x transposed in blocks of 1xn (nx1 of x): what dgrad and wgrad need, in one read.

    Args:
        x: [M, K] as in :func:`quantize_rows`.
        along_rows: whether the first of the two is wanted.

    Returns:
        (codes [M, K] and scales [M, ceil(K/n)], codes [K, M] and scales [K, ceil(M/n)]); codes contiguous, scales with
        strides (1, M) and (1, K).
    """
    x = _prepared(x, (1, n), scale_format)
    rows, columns = x.shape
    options = {"dtype": torch.float32, "device": x.device}
    data_t = torch.empty((columns, rows), dtype=FP8_DTYPE, device=x.device)
    scale_t = torch.empty((triton.cdiv(rows, n), columns), **options).t()
    data, scale = data_t, scale_t
    if along_rows:
        data = torch.empty((rows, columns), dtype=FP8_DTYPE, device=x.device)
        scale = torch.empty((triton.cdiv(columns, n), rows), **options).t()
    if x.numel():
        _both_kernel[(triton.cdiv(rows, n), triton.cdiv(columns, n))](
            _bits(x), data.view(torch.uint8), scale, data_t.view(torch.uint8), scale_t, rows, columns, x.stride(0), eps,
            torch.finfo(x.dtype).max, N=n, WIDTH=triton.next_power_of_2(n), POW2=scale_format == "pow2",
            ALONG_ROWS=along_rows, HARDWARE_CAST=_hardware_cast(x, hardware_cast), num_warps=8,
        )  # fmt: skip
    return (QuantizedTensor(data, scale, (1, n)) if along_rows else None), QuantizedTensor(data_t, scale_t, (1, n))


def quantize_blocks(
    x: torch.Tensor,
    block: tuple[int, int],
    *,
    scale_format: str = "fp32",
    eps: float = 0.0,
    transposed: bool = False,
    hardware_cast: bool | None = None,
) -> QuantizedTensor:
    """Blocks of RxC: a weight.

    Args:
        x: [N, K] as in :func:`quantize_rows`.
        block: (R, C).
        transposed: return the same codes and scales transposed, the codes contiguous as [K, N]: dgrad's operand.
    """
    x = _prepared(x, block, scale_format)
    (rows, columns), (r, c) = x.shape, block
    data = torch.empty((columns, rows) if transposed else x.shape, dtype=FP8_DTYPE, device=x.device)
    scale_inv = torch.empty((triton.cdiv(rows, r), triton.cdiv(columns, c)), dtype=torch.float32, device=x.device)
    if x.numel():
        _blocks_kernel[tuple(scale_inv.shape)](
            _bits(x), data.view(torch.uint8), scale_inv, rows, columns, x.stride(0), eps,
            torch.finfo(x.dtype).max, R=r, C=c, HEIGHT=triton.next_power_of_2(r), WIDTH=triton.next_power_of_2(c),
            POW2=scale_format == "pow2", TRANSPOSED=transposed,
            HARDWARE_CAST=_hardware_cast(x, hardware_cast), num_warps=8,
        )  # fmt: skip
    if transposed:
        return QuantizedTensor(data, scale_inv.t(), (c, r))
    return QuantizedTensor(data, scale_inv, (r, c))


def _prepared(x: torch.Tensor, block: tuple[int, int], scale_format: str) -> torch.Tensor:
    if x.dim() != 2 or x.dtype not in _DTYPES:
        raise DataError(
            asked="quantise a 2-D bfloat16, float16 or float32 tensor",
            found=f"{x.dtype} of shape {tuple(x.shape)}",
            fix="flatten the leading dimensions and cast the tensor",
        )
    if scale_format not in SCALE_FORMATS:
        raise ConfigError(
            f"fp8.recipe.scale_format={scale_format!r}", "unknown", f"use one of {', '.join(SCALE_FORMATS)}"
        )
    if min(block) < 1:
        raise ConfigError(
            f"blocks of {tuple(block)}", "not positive", "set fp8.recipe.weight_block to positive integers"
        )
    return x if x.stride(1) == 1 else x.contiguous()


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _hardware_cast(x: torch.Tensor, wanted: bool | None) -> bool:
    return x.is_cuda if wanted is None else wanted


@triton.jit
def _load(pointers, mask):
    """float32 values; bfloat16 comes as int16 bits, so that its subnormals are exact in the interpreter as well."""
    if pointers.dtype.element_ty == tl.int16:
        value = (tl.load(pointers, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _magnitude(value):
    """The bits of |value|, 0 for NaN; as integers they order as the magnitudes do."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits > _INFINITY, 0, bits)


@triton.jit
def _scales(amax_bits, eps, largest, POW2: tl.constexpr):
    """(s, 1 / s) of blocks whose amax has these bits; ``largest`` is the largest finite value of x's dtype."""
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), eps)
    scale = tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax)
    scale = tl.where(scale == float("inf"), largest, scale)
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    scale = tl.where((amax == 0.0) | (scale == 0.0), 1.0, scale)
    return scale, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)


@triton.jit
def _encode(product, HARDWARE_CAST: tl.constexpr):
    """The e4m3 code of each float32, as a byte."""
    if HARDWARE_CAST:
        code = product.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = product.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Round the 23 mantissa bits to 3, ties to even, and move the exponent's bias from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 the codes are steps of 2^-9, the spacing of float32 at 2^14: the addition rounds.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(magnitude < 0x3C800000, subnormal, normal), 0x7E) | ((bits >> 24) & 0x80)
        code = tl.where(magnitude > _INFINITY, 0x7F, code).to(tl.uint8)
    return code


@triton.jit
def _rows_kernel(
    x, codes, scales, rows, columns, x_stride, scale_stride, scale_block_stride, eps, largest,
    N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, POW2: tl.constexpr, HARDWARE_CAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1).to(tl.int64)
    offset = tl.arange(0, WIDTH)
    column = block * N + offset
    inside = (row < rows)[:, None] & ((offset < N) & (column < columns))[None, :]
    value = _load(x + row[:, None] * x_stride + column[None, :], inside)
    scale, scale_inv = _scales(tl.max(_magnitude(value), axis=1), eps, largest, POW2)
    code = _encode(value * scale[:, None], HARDWARE_CAST)
    tl.store(codes + row[:, None] * columns + column[None, :], code, mask=inside)
    tl.store(scales + row * scale_stride + block * scale_block_stride, scale_inv, mask=row < rows)


@triton.jit
def _both_kernel(
    x, codes, scales, codes_t, scales_t, rows, columns, x_stride, eps, largest,
    N: tl.constexpr, WIDTH: tl.constexpr, POW2: tl.constexpr, ALONG_ROWS: tl.constexpr, HARDWARE_CAST: tl.constexpr,
):  # fmt: skip
    offset = tl.arange(0, WIDTH)
    row_block = tl.program_id(0).to(tl.int64)
    column_block = tl.program_id(1).to(tl.int64)
    row = row_block * N + offset
    column = column_block * N + offset
    row_inside = (offset < N) & (row < rows)
    column_inside = (offset < N) & (column < columns)
    inside = row_inside[:, None] & column_inside[None, :]
    value = _load(x + row[:, None] * x_stride + column[None, :], inside)
    magnitude = _magnitude(value)
    if ALONG_ROWS:
        scale, scale_inv = _scales(tl.max(magnitude, axis=1), eps, largest, POW2)
        code = _encode(value * scale[:, None], HARDWARE_CAST)
        tl.store(codes + row[:, None] * columns + column[None, :], code, mask=inside)
        tl.store(scales + column_block * rows + row, scale_inv, mask=row_inside)
    scale, scale_inv = _scales(tl.max(magnitude, axis=0), eps, largest, POW2)
    code = _encode(value * scale[None, :], HARDWARE_CAST)
    tl.store(codes_t + column[None, :] * rows + row[:, None], code, mask=inside)
    tl.store(scales_t + row_block * columns + column, scale_inv, mask=column_inside)


@triton.jit
def _blocks_kernel(
    x, codes, scales, rows, columns, x_stride, eps, largest,
    R: tl.constexpr, C: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    POW2: tl.constexpr, TRANSPOSED: tl.constexpr, HARDWARE_CAST: tl.constexpr,
):  # fmt: skip
    row_offset = tl.arange(0, HEIGHT)
    column_offset = tl.arange(0, WIDTH)
    row_block = tl.program_id(0).to(tl.int64)
    column_block = tl.program_id(1).to(tl.int64)
    row = row_block * R + row_offset
    column = column_block * C + column_offset
    inside = ((row_offset < R) & (row < rows))[:, None] & ((column_offset < C) & (column < columns))[None, :]
    value = _load(x + row[:, None] * x_stride + column[None, :], inside)
    amax = tl.max(tl.max(_magnitude(value), axis=1), axis=0)
    scale, scale_inv = _scales(amax, eps, largest, POW2)
    code = _encode(value * scale, HARDWARE_CAST)
    if TRANSPOSED:
        tl.store(codes + column[None, :] * rows + row[:, None], code, mask=inside)
    else:
        tl.store(codes + row[:, None] * columns + column[None, :], code, mask=inside)
    tl.store(scales + row_block * ((columns + C - 1) // C) + column_block, scale_inv)
