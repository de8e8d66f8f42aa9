"""The one FP8 quantiser of trainer, weight sync and rollout.

How it works, in ten lines. An e4m3 number has 8 bits: it reaches 448 and keeps 4 significant bits. Weights and
activations differ in size by far more than it can hold, so each block of a matrix gets a scale that moves its largest
magnitude to 448. The formula is TransformerEngine's blockwise one, bit for bit (transformer_engine/common/recipe/
recipe_common.cuh, compute_scale_from_amax; common/transpose/quantize_transpose_{square,vector}_blockwise.cu)::

    x                           [M, K] bfloat16, float16 or float32
    amax = max |x|              [row blocks, column blocks], at least eps
    s = 448 / amax              float32, an IEEE division; scale format pow2 clears the mantissa of s
    code = e4m3(float32(x) * s) [M, K], one byte each; nearest even, saturating
    scale_inv = 1 / s           [row blocks, column blocks] float32, so that x is about code * scale_inv

Where there is no quotient: s is 1 for an amax of 0 or infinity, and x's dtype's largest value where float32 overflows.

What surprises:

* Almost equal is worth nothing. Two equal forwards give log-prob differences of exactly zero; a third of the scales
  one ulp off already gives a k3 of 1e-2 (measured, SmolLM2-135M). So every operation here is exact or IEEE, and the
  tests compare bits.
* ``448.0 / amax`` is a trap: PyTorch computes ``amax.reciprocal() * 448``, and a third of the scales come out one ulp
  off. ``torch.div`` of two tensors is the quotient.
* Zero padding of tokens or columns changes nothing: zeros never raise an amax.
"""

from dataclasses import dataclass

import torch

from verl_fp8.errors import ConfigError, DataError
from verl_fp8.numerics.blocks import block_max, by_block, decode, scale_, whole_rows
from verl_fp8.numerics.recipe import SCALE_FORMATS, WHOLE, Recipe

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0

# Whoever finds a weight that is not finite says what to do with this sentence.
FIX_THE_WEIGHTS = "the weights have diverged or were loaded wrongly: check the last optimiser step and the checkpoint"

# Per input dtype: the integer that its bits are viewed as, the mask that drops the sign, the bits of +infinity. Without
# the sign, bits order as the magnitudes do, infinity above every number and NaN above infinity; integer max is exact
# and faster.
_BITS = {
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
}
_CLEAR_MANTISSA = -0x800000  # 0xFF800000 as a signed 32-bit integer

# The bits of 1e-35, whose 448 / amax float32 still holds; float16 has no such small numbers.
_ORDINARY = {torch.bfloat16: 0x0555, torch.float16: 1, torch.float32: 0x0554AD2E}

# Elements up to which calls, not arithmetic, take the time on CPUs.
FEW = 1 << 18

# Elements handled at once. On CPUs the intermediates of a chunk (12 MiB) stay in the L3 cache and are not paged in anew
# for each tensor, while each step still is long against an OpenMP barrier; 2^16 to 2^20 measured slower. On
# accelerators the limit only bounds memory (256 MiB of float32).
CHUNK_CPU = 1 << 21
CHUNK_ACCELERATOR = 1 << 26


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """FP8 codes with one scale a block.

    Attributes:
        data: [M, K] float8_e4m3fn.
        scale_inv: [ceil(M / rows), ceil(K / columns)] float32; multiply by it to dequantise (vLLM's
            ``weight_scale_inv``).
        block: (rows, columns), either of them :data:`~verl_fp8.numerics.recipe.WHOLE`.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        """(M, K)."""
        return self.data.shape

    def t(self) -> "QuantizedTensor":
        """The transpose: the same codes and scales as views, so a weight's square blocks serve forward and dgrad."""
        return QuantizedTensor(self.data.t(), self.scale_inv.t(), self.block[::-1])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[M, K] codes times scales, multiplied in float32 and then cast to ``dtype``.

        The order is TransformerEngine's (pytorch/tensor/storage/float8_blockwise_tensor_storage.py,
        _dequantize_vectorwise).
        """
        if not self.data.is_contiguous() and self.data.t().is_contiguous():
            return self.t().dequantize(dtype).t()
        out = torch.empty(self.data.shape, dtype=dtype, device=self.data.device)
        block = _sides(self.data, self.block)
        step = _rows_at_once(self.data, block[0])
        for start in range(0, self.data.shape[0] if self.data.numel() else 0, step):
            codes, part = self.data[start : start + step], out[start : start + step]
            values = part if dtype == torch.float32 else torch.empty_like(part, dtype=torch.float32)
            first = start // block[0]
            scale_inv = self.scale_inv[first : first + -(-codes.shape[0] // block[0])]
            decode(codes, scale_inv, block, values)
            if values is not part:
                part.copy_(values)
        return out


def quantize(
    x: torch.Tensor,
    block: tuple[int, int],
    *,
    scale_format: str = "fp32",
    eps: float = 0.0,
    check_finite: bool = True,
    amax_bits: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Quantise a matrix block by block, bit for bit as TransformerEngine does (see the module's docstring).

    Args:
        x: [M, K] bfloat16, float16 or float32, any strides; M or K may be 0 and need not be multiples of the block.
        block: (rows, columns) sharing a scale: (128, 128) for weights, (1, 128) for activations along K, (128, 1) along
            tokens; :data:`~verl_fp8.numerics.recipe.WHOLE` is all of a side.
        scale_format: ``fp32`` or ``pow2``.
        eps: floor on amax.
        check_finite: raise on infinity and NaN (weights). If False they follow TransformerEngine's formula: an infinity
            makes its block's s 1 and saturates to 448, a NaN does not enter amax and gets the code 0x7F; on
            accelerators nothing waits for the device then.
        amax_bits: of ``x``'s blocks where they reach beyond ``x``, a shard: :func:`amax_bits`, joined with the other
            shards' by maximum. None: ``x``'s own.

    Returns:
        The codes, contiguous, and their scales.

    Raises:
        DataError: ``x`` is not such a matrix, or ``check_finite`` found infinities or NaN.
        ConfigError: an unknown ``scale_format`` or a bad ``block``.
    """
    rows, columns = _check(x, block, scale_format)
    height, width = x.shape
    if (
        0 < x.numel() <= FEW
        and x.device.type == "cpu"
        and eps == 0.0
        and amax_bits is None
        and whole_rows(x, (rows, columns))
    ):
        few = _quantize_few(x, (rows, columns), scale_format)
        if few is not None:
            return QuantizedTensor(*few, tuple(block))
    data = torch.empty(x.shape, dtype=FP8_DTYPE, device=x.device)
    scale_inv = torch.empty((-(-height // rows), -(-width // columns)), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return QuantizedTensor(data, scale_inv, tuple(block))
    int_dtype = _BITS[x.dtype][0]
    step = _rows_at_once(x, rows)
    bits_buffer = torch.empty((min(step, height), width), dtype=int_dtype, device=x.device)
    buffer = torch.empty(bits_buffer.shape, dtype=torch.float32, device=x.device)
    for start in range(0, height, step):
        chunk = x[start : start + step].contiguous()
        bits, values = bits_buffer[: chunk.shape[0]], buffer[: chunk.shape[0]]
        here = slice(start // rows, start // rows - (-chunk.shape[0] // rows))
        given = None if amax_bits is None else amax_bits[here].to(int_dtype)
        largest, suspect = _largest(chunk, bits, (rows, columns), given, look=check_finite or x.device.type == "cpu")
        if suspect and check_finite:
            raise _not_finite(x)
        scale = _scale_of(largest.view(x.dtype).float(), x.dtype, scale_format, eps)
        torch.reciprocal(scale, out=scale_inv[here])
        values.copy_(chunk)
        scale_(values, scale, (rows, columns))
        if suspect:
            # Finite blocks need no clamp: |x| * s <= 448 * (1 + 2^-23), which rounds to 448. The NaN fill drops its
            # sign, as cvt.satfinite does.
            values.clamp_(-FP8_MAX, FP8_MAX).masked_fill_(values.isnan(), float("nan"))
        data[start : start + step].copy_(values)
    return QuantizedTensor(data, scale_inv, tuple(block))


def quantize_weight(w: torch.Tensor, recipe: Recipe, *, amax_bits: torch.Tensor | None = None) -> QuantizedTensor:
    """A weight [N, K] in ``recipe.weight_block``, as :func:`quantize` does it; a value that is not finite raises."""
    return quantize(w, recipe.weight_block, scale_format=recipe.scale_format, eps=recipe.eps, amax_bits=amax_bits)


def quantize_activation(x: torch.Tensor, recipe: Recipe, block: tuple[int, int] | None = None) -> QuantizedTensor:
    """An activation or gradient [M, K], as :func:`quantize` does it; infinities and NaN pass.

    Args:
        x: the matrix.
        recipe: its scale format and eps.
        block: ``recipe.activation_block`` if None; ``recipe.gradient_block``, or either turned to lie along the tokens.
    """
    block = recipe.activation_block if block is None else block
    return quantize(x, block, scale_format=recipe.scale_format, eps=recipe.eps, check_finite=False)


def _largest(
    chunk: torch.Tensor, bits: torch.Tensor, block: tuple[int, int], given: torch.Tensor | None, *, look: bool
) -> tuple[torch.Tensor, bool]:
    """(bits of each block's amax without NaN, whether some value may not be finite); ``bits`` is scratch.

    Args:
        given: bits to take instead of ``chunk``'s own.
        look: read the largest back. Else anything is suspect: a flag read back would stall an accelerator (and break
            CUDA graph capture).
    """
    int_dtype, mask, infinity = _BITS[chunk.dtype]
    torch.bitwise_and(chunk.view(int_dtype), mask, out=bits)
    largest = block_max(bits, block) if given is None else given
    suspect = int(largest.max()) >= infinity if look else True
    if suspect:
        bits.masked_fill_(bits > infinity, 0)  # fmaxf, which the TE kernels reduce with, ignores NaN
        if given is None:
            largest = block_max(bits, block)
    return largest, suspect


def _quantize_few(
    x: torch.Tensor, block: tuple[int, int], scale_format: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """:func:`quantize`'s (codes, scale_inv) of a decoding step's activations, in half as many calls; None if a block is
    not ordinary.

    Ordinary: finite, not all 0, and so large that 448 / amax does not overflow.
    """
    int_dtype, mask, infinity = _BITS[x.dtype]
    x, shape = x.contiguous(), by_block(x, block)
    largest = x.view(int_dtype).bitwise_and(mask).view(shape).amax(2)
    low, high = largest.aminmax()
    if int(high) >= infinity or int(low) < _ORDINARY[x.dtype]:
        return None
    amax = largest.view(x.dtype).float()
    scale = torch.div(torch.full_like(amax, FP8_MAX), amax)
    if scale_format == "pow2":
        scale.view(torch.int32).bitwise_and_(_CLEAR_MANTISSA)
    data = torch.mul(x.view(shape), scale.unsqueeze(2)).view(x.shape).to(FP8_DTYPE)
    return data, scale.reciprocal_()


def amax_bits(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block as the integer of its bits, which orders as magnitudes do (NaN on top).

    A block cut into shards has the maximum of theirs: that is how a sharded weight is quantised without gathering it.

    Args:
        x: as in :func:`quantize`.
        block: (rows, columns).

    Returns:
        [row blocks, column blocks] int32.
    """
    int_dtype, mask, _ = _BITS[x.dtype]
    bits = torch.bitwise_and(x.contiguous().view(int_dtype), mask)
    return block_max(bits, _sides(x, block)).to(torch.int32)


def scale_inv_of(bits: torch.Tensor, dtype: torch.dtype, *, scale_format: str, eps: float) -> torch.Tensor | None:
    """``scale_inv`` of the blocks that :func:`amax_bits` found in a tensor of ``dtype``; None if one is not finite."""
    int_dtype, _, infinity = _BITS[dtype]
    if bits.numel() and int(bits.max()) >= infinity:
        return None
    return torch.reciprocal(_scale_of(bits.to(int_dtype).view(dtype).float(), dtype, scale_format, eps))


def _scale_of(amax: torch.Tensor, x_dtype: torch.dtype, scale_format: str, eps: float) -> torch.Tensor:
    """s of each block; amax is float32 and never NaN."""
    if eps > 0:
        amax = amax.clamp(min=eps)
    scale = torch.div(torch.full_like(amax, FP8_MAX), amax)  # never FP8_MAX / amax: see the module's docstring
    scale.nan_to_num_(posinf=torch.finfo(x_dtype).max)
    if scale_format == "pow2":
        scale.view(torch.int32).bitwise_and_(_CLEAR_MANTISSA)
    # An infinite amax is the only one that gives s = 0.
    return scale.masked_fill_((amax == 0).logical_or_(scale == 0), 1.0)


def _rows_at_once(x: torch.Tensor, rows: int) -> int:
    budget = CHUNK_CPU if x.device.type == "cpu" else CHUNK_ACCELERATOR
    return rows * max(1, budget // (rows * max(1, x.shape[1])))


def _check(x: torch.Tensor, block: tuple[int, int], scale_format: str) -> tuple[int, int]:
    if x.dim() != 2 or x.dtype not in _BITS:
        raise DataError(
            asked="quantise a 2-D bfloat16, float16 or float32 tensor",
            found=f"{x.dtype} of shape {tuple(x.shape)}",
            fix="flatten the leading dimensions and cast the tensor",
        )
    if scale_format not in SCALE_FORMATS:
        known = ", ".join(SCALE_FORMATS)
        raise ConfigError(f"fp8.recipe.scale_format={scale_format!r}", "no such format", f"use one of {known}")
    if any(side < 1 and side != WHOLE for side in block):
        raise ConfigError(f"blocks of {tuple(block)}", "not positive", "give positive fp8.recipe.weight_block")
    return _sides(x, block)


def _sides(x: torch.Tensor, block: tuple[int, int]) -> tuple[int, int]:
    """The block's sides in values; of an empty tensor's whole side 1."""
    return tuple(max(1, size) if side == WHOLE else side for size, side in zip(x.shape, block, strict=True))


def _not_finite(x: torch.Tensor) -> DataError:
    bad = ~torch.isfinite(x)
    row, column = divmod(int(bad.flatten().to(torch.uint8).argmax()), x.shape[1])
    return DataError(
        asked=f"quantise a {x.dtype} tensor of shape {tuple(x.shape)} to FP8",
        found=f"{int(bad.sum())} values that are not finite, the first at [{row}, {column}]: {float(x[row, column])}",
        fix=FIX_THE_WEIGHTS,
    )
