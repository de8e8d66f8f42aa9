"""Walking over a matrix by its blocks: what the quantiser and the dequantiser do to each, on any device, in few
passes."""

from collections.abc import Iterator

import torch


def tiles(t: torch.Tensor, block: tuple[int, int]) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """Views [row blocks, rows, column blocks, columns] covering t, with their places in the scales; up to 4 if ragged.

    t is contiguous. Ragged edges are blocks of their own, as zero padding would leave them.
    """
    spans = []
    for size, unit in zip(t.shape, block, strict=True):
        whole, rest = divmod(size, unit)
        spans.append([(0, whole, unit)] * (whole > 0) + [(whole, whole + 1, rest)] * (rest > 0))
    for r0, r1, rows in spans[0]:
        for c0, c1, columns in spans[1]:
            start = t.storage_offset() + r0 * block[0] * t.shape[1] + c0 * block[1]
            size = (r1 - r0, rows, c1 - c0, columns)
            yield t.as_strided(size, (rows * t.shape[1], t.shape[1], columns, 1), start), slice(r0, r1), slice(c0, c1)


def block_max(bits: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest integer of each block, [row blocks, column blocks]."""
    # Columns before rows: twice as fast as both at once, whose inner loop is strided.
    parts = [(tile.amax(3).amax(1), rows, columns) for tile, rows, columns in tiles(bits, block)]
    if len(parts) == 1:
        return parts[0][0]
    out = bits.new_empty(tuple(-(-size // unit) for size, unit in zip(bits.shape, block, strict=True)))
    for part, rows, columns in parts:
        out[rows, columns] = part
    return out


def scale_(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> None:
    """Multiply each block of values by its scale, in place; ragged edges included."""
    for tile, rows, columns in tiles(values, block):
        tile.mul_(scale[rows, None, columns, None])


def decode(codes: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> None:
    """Write the float32 values of e4m3 codes, times their blocks' scales, to out.

    On CPUs torch's own cast is scalar code (4096 x 4096: 56 ms on two cores, this: 4), so the bits are moved: e4m3's
    fields at float16's places read as the value times 2^-8 (exponent biases 7 and 15), subnormals included. The 2^8
    goes into the scale, exactly: a scale is at most 2^120.
    """
    if codes.device.type != "cpu":
        out.copy_(codes)
        scale_(out, scale_inv, block)
        return
    # Times 128 moves the sign to bit 15; bit 14, another copy of it, is cleared.
    half = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(-0x4080).view(torch.float16)
    scale = scale_inv * 256.0
    if whole_rows(codes, block):
        torch.mul(half.view(by_block(codes, block)), scale.unsqueeze(2), out=out.view(by_block(codes, block)))
    else:
        out.copy_(half)
        scale_(out, scale, block)
    magnitude = codes.view(torch.uint8).bitwise_and(0x7F)
    if int(magnitude.max()) == 0x7F:
        out.masked_fill_(magnitude == 0x7F, float("nan"))


def whole_rows(t: torch.Tensor, block: tuple[int, int]) -> bool:
    """Whether the blocks are parts of one row and none is ragged: activations."""
    return block[0] == 1 and t.shape[1] % block[1] == 0


def by_block(t: torch.Tensor, block: tuple[int, int]) -> tuple[int, int, int]:
    """[M, column blocks, columns] of such a matrix."""
    return t.shape[0], t.shape[1] // block[1], block[1]
