"""The Triton quantiser's bits, in Triton's interpreter; test_triton_quant.py runs this file with TRITON_INTERPRET=1.

Triton decides at import whether it interprets, hence a process, and a file, of its own.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from verl_fp8.errors import DataError
from verl_fp8.numerics import quantize, quantize_triton
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.sync import stream

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "te_blockwise_golden.npz")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = ("fp32", "pow2")


def same_bits(found, expected):
    """Codes and scales equal as integers, blocks equal."""
    return (
        found.block == expected.block
        and torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        and torch.equal(
            found.scale_inv.contiguous().view(torch.int32), expected.scale_inv.contiguous().view(torch.int32)
        )
    )


def assert_all_equal_numerics(x, block, scale_format, eps):
    """Every entry of the module against numerics.quantize of x and of x transposed."""
    n, options = block[1], {"scale_format": scale_format, "eps": eps}
    loose = {**options, "check_finite": False}
    assert same_bits(quantize_triton.quantize_blocks(x, block, **options), quantize.quantize(x, block, **loose))
    transposed = quantize_triton.quantize_blocks(x, block, transposed=True, **options)
    assert transposed.data.is_contiguous()
    assert same_bits(transposed, quantize.quantize(x, block, **loose).t())
    rows, columns = quantize.quantize(x, (1, n), **loose), quantize.quantize(x.t().contiguous(), (1, n), **loose)
    for outer_major in (True, False):
        assert same_bits(quantize_triton.quantize_rows(x, n, outer_major=outer_major, **options), rows)
    both = quantize_triton.quantize_both(x, n, **options)
    assert same_bits(both[0], rows)
    assert same_bits(both[1], columns)
    none, only = quantize_triton.quantize_both(x, n, along_rows=False, **options)
    assert none is None
    assert same_bits(only, columns)


@pytest.mark.parametrize("key", [k.removesuffix("__codes") for k in GOLDEN.files if k.endswith("__codes")])
def test_golden(key):
    """Every tensor of TransformerEngine's own test reference, codes and scales."""
    name, _, spec = key.partition("__")
    tile, _, scale_format = spec.partition("_")
    x = torch.from_numpy(GOLDEN[f"{name}__x"])
    x = x.view(torch.bfloat16) if name.startswith("bf16") else x
    q = quantize_triton.quantize(x, tuple(map(int, tile.split("x"))), scale_format=scale_format)
    assert q.data.view(torch.uint8).tolist() == GOLDEN[f"{key}__codes"].tolist()
    expected = torch.from_numpy(GOLDEN[f"{key}__scale_inv"].reshape(q.scale_inv.shape))
    assert torch.equal(q.scale_inv.view(torch.int32), expected.view(torch.int32))


def adversarial(dtype, shape, seed):
    """Raw bits (subnormals, infinities, NaN of both signs) in the upper half, e4m3 midpoints and neighbours in the
    lower."""
    generator = torch.Generator().manual_seed(seed)
    half = (shape[0] // 2, shape[1])
    special = torch.tensor(
        [0, 1, 0x8000, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7BFF, 0x7C00, 0x0400, 0xFC01]
    )
    bits = special[torch.randint(0, len(special), half, generator=generator)]
    anything = torch.randint(0, 65536, half, generator=generator)
    bits = torch.where(torch.rand(half, generator=generator) < 0.5, bits, anything)
    # A quarter of the rows without infinities and NaN, which would decide every scale.
    bits[::4] &= 0x3FFF
    if dtype == torch.float32:
        upper = ((bits << 16) | torch.randint(0, 65536, half, generator=generator)).to(torch.uint32).view(dtype)
    else:
        upper = bits.to(torch.uint16).view(dtype)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (codes[1:] + codes[:-1]) / 2
    down, up = (torch.nextafter(midpoints, torch.tensor(to)) for to in (0.0, 1e9))
    pool = torch.cat([codes, midpoints, down, up])
    pool = torch.cat([pool, -pool])
    lower = pool[torch.randint(0, len(pool), (shape[0] - half[0], shape[1]), generator=generator)]
    lower *= torch.tensor([1.0, 2.0**-9, 2.0**7, 3.0])[torch.arange(lower.shape[0])[:, None] % 4]
    lower[:, ::7] = 448.0  # s is exactly 1 there, so midpoints stay midpoints
    return torch.cat([upper, lower.to(dtype)])


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(24, 20), (16, 16), (32, 32)])
def test_adversarial(dtype, block, scale_format, eps):
    """Codes and scales equal numerics/quantize.py on data made to break them, in every layout, with ragged edges."""
    assert_all_equal_numerics(adversarial(dtype, (70, 45), seed=block[0]), block, scale_format, eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_format", FORMATS)
def test_every_16_bit_pattern(dtype, scale_format):
    """All bit patterns of bf16 and fp16, and float32 with random low bits: NaN, infinities and subnormals among
    them."""
    bits = torch.arange(65536, dtype=torch.int32)
    if dtype == torch.float32:
        noise = torch.randint(0, 65536, bits.shape, generator=torch.Generator().manual_seed(0))
        x = ((bits << 16) | noise.to(torch.int32)).view(torch.float32)
    else:
        x = bits.to(torch.uint16).view(dtype)
    x = x[torch.randperm(65536, generator=torch.Generator().manual_seed(1))].reshape(256, 256)
    assert_all_equal_numerics(x, (128, 128), scale_format, 0.0)


def test_strides_and_ragged_edges():
    """A view with a row stride, a transposed view, sizes off the block; scales into a given tensor."""
    wide = torch.randn(37, 500, generator=torch.Generator().manual_seed(2)).bfloat16()
    for x in (wide[:, 100:333], wide.t()):
        assert_all_equal_numerics(x, (128, 128), "fp32", 0.0)
    scales = torch.full((40, 4), -1.0).t().contiguous().t()[:37]
    q = quantize_triton.quantize_rows(wide, 128, scale_inv=scales)
    assert q.scale_inv is scales
    assert same_bits(q, quantize.quantize(wide, (1, 128)))


@pytest.mark.parametrize("block", [(1, 4), (4, 1), (4, 4)])
def test_quantize_is_numerics_quantize(block):
    """The general entry: the same bits, and the same error with the place of a value that is not finite."""
    x = torch.randn(10, 12)
    assert same_bits(quantize_triton.quantize(x, block), quantize.quantize(x, block))
    x[3, 5] = float("nan")
    with pytest.raises(DataError, match=r"\[3, 5\]"):
        quantize_triton.quantize(x, block)
    loose = quantize_triton.quantize(x, block, check_finite=False)
    assert same_bits(loose, quantize.quantize(x, block, check_finite=False))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", [(256, 128), (130, 72), (64, 200)])
def test_the_weight_sync_sends_the_same_codes_from_a_gpu(monkeypatch, shape, scale_format):
    """sync.codes_of_weight of fp32 masters, whole and ragged: Triton's for a CUDA tensor, numerics' for others, one
    result."""
    settings = Fp8Settings.parse({"mode": "unified", "recipe": {"scale_format": scale_format}}, capability=None)
    master = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 0.02
    expected, calls = stream.codes_of_weight(master, settings), []
    launch = quantize_triton.quantize
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(quantize_triton, "_hardware_cast", lambda x, wanted: False)
    monkeypatch.setattr(
        quantize_triton, "quantize", lambda *args, **kwargs: calls.append(args) or launch(*args, **kwargs)
    )
    assert same_bits(stream.codes_of_weight(master, settings), expected)
    assert len(calls) == 1
    master[3, 5] = float("nan")
    with pytest.raises(DataError, match=r"\[3, 5\]"):
        stream.codes_of_weight(master, settings)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_empty(shape):
    """No rows or no columns: no launch, the same shapes."""
    x = torch.empty(shape, dtype=torch.bfloat16)
    assert same_bits(quantize_triton.quantize_rows(x, 4), quantize.quantize(x, (1, 4)))
    assert same_bits(quantize_triton.quantize_blocks(x, (4, 4)), quantize.quantize(x, (4, 4)))
