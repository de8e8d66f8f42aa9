"""The quantiser and the dequantiser, bit for bit.

Two independent authorities: TransformerEngine's own test reference (tests/golden) and the slow exact arithmetic below.
"""

from fractions import Fraction
from math import ceil, copysign, inf, isinf
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_fp8.errors import ConfigError, DataError
from verl_fp8.numerics import quantize as module
from verl_fp8.numerics.quantize import QuantizedTensor, amax_bits, quantize, scale_inv_of
from verl_fp8.numerics.recipe import WHOLE

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "te_blockwise_golden.npz")
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
LARGEST = {dtype: torch.finfo(dtype).max for dtype in INTEGERS}


# -- exact arithmetic --------------------------------------------------------------------------------------------------

# Value of the codes 0x00..0x7E; 0x7F is NaN (OCP 8-bit floating point specification 1.0, E4M3).
E4M3 = [Fraction(c & 7, 512) if c < 8 else Fraction(8 + (c & 7)) * Fraction(2) ** ((c >> 3) - 10) for c in range(127)]


def float32(value):
    """The float32 nearest to a non-negative Fraction, ties to even, as a Fraction; inf on overflow."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= value < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(value / unit) * unit  # round() on a Fraction takes ties to even
    return rounded if rounded < Fraction(2) ** 128 else inf


def encode(magnitude):
    """The code nearest to a non-negative Fraction, ties to the even code, saturating."""
    return min(range(127), key=lambda code: (abs(E4M3[code] - magnitude), code & 1))


def slow_quantize(x, block, scale_format, eps):
    """TransformerEngine's formula on one element after another; returns codes and scale_inv as lists."""
    rows, columns = block
    height, width = x.shape
    values = x.double().tolist()
    codes = [[0] * width for _ in range(height)]
    scale_inv = [[0.0] * ceil(width / columns) for _ in range(ceil(height / rows))]
    for r in range(0, height, rows):
        for c in range(0, width, columns):
            cells = [(i, j) for i in range(r, min(r + rows, height)) for j in range(c, min(c + columns, width))]
            amax = max(max(abs(Fraction(values[i][j])) for i, j in cells), float32(Fraction(eps)))
            scale = float32(Fraction(448) / amax) if amax else Fraction(1)
            if scale == inf:
                scale = Fraction(LARGEST[x.dtype])
            if scale_format == "pow2" and amax:
                exponent = scale.numerator.bit_length() - scale.denominator.bit_length()
                exponent -= scale < Fraction(2) ** exponent
                scale = Fraction(2) ** exponent
            scale_inv[r // rows][c // columns] = float(float32(1 / scale))
            for i, j in cells:
                code = encode(float32(abs(Fraction(values[i][j])) * scale))
                codes[i][j] = code | (0x80 if copysign(1, values[i][j]) < 0 else 0)
    return codes, scale_inv


def assert_same_bits(q, codes, scale_inv):
    """Compare codes and scales as integers."""
    assert q.data.view(torch.uint8).tolist() == codes
    expected = torch.tensor(scale_inv, dtype=torch.float32).reshape(q.scale_inv.shape)
    assert torch.equal(q.scale_inv.view(torch.int32), expected.view(torch.int32))


def test_the_slow_reference_itself():
    """The table against torch's decoder, float32() against numpy's rounding, encode() on ties and saturation."""
    assert [float(v) for v in E4M3] == torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    for value in (1 / 3, 1e-45, 7e-46, 1.1e-38, 3.4028235e38, 0.1 + 0.2):
        assert float(float32(Fraction(value))) == float(np.float32(value))
    assert isinf(float32(Fraction(2) ** 128))
    assert encode(Fraction(17)) == E4M3.index(16)  # halfway between 16 and 18, whose code is odd
    assert encode(Fraction(19)) == E4M3.index(20)
    assert encode(Fraction(1, 1024)) == 0
    assert encode(Fraction(500)) == 126


# -- quantize ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [k.removesuffix("__codes") for k in GOLDEN.files if k.endswith("__codes")])
def test_golden(key):
    """Every tensor of TransformerEngine's own test reference, codes and scales."""
    name, _, spec = key.partition("__")
    tile, _, scale_format = spec.partition("_")
    x = torch.from_numpy(GOLDEN[f"{name}__x"])
    x = x.view(torch.bfloat16) if name.startswith("bf16") else x
    q = quantize(x, tuple(map(int, tile.split("x"))), scale_format=scale_format)
    assert_same_bits(q, GOLDEN[f"{key}__codes"].tolist(), GOLDEN[f"{key}__scale_inv"].tolist())


def finite(dtype, bits):
    """A tensor from raw bit patterns, with infinities and NaN turned into finite values by clearing an exponent bit."""
    mask = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}[dtype]
    bits = np.where(bits & mask == mask, bits & ~(mask & -mask), bits)
    return torch.from_numpy(bits.astype(np.uint32 if dtype == torch.float32 else np.uint16)).view(dtype)


@st.composite
def matrices(draw):
    """Small matrices of raw bits, or of e4m3 midpoints and their neighbours under an amax of 448 * 2^k (s is 2^-k)."""
    dtype = draw(st.sampled_from(list(INTEGERS)))
    height, width = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    size = height * width
    if draw(st.booleans()):
        largest = 2**32 - 1 if dtype == torch.float32 else 2**16 - 1
        # Both zeros, the smallest and largest subnormals and normals of the three formats.
        special = [0, 1, 0x8000, 0x80000000, 0x7F, 0x80, 0x3FF, 0x400, 0x7F7F, 0x7BFF, 0x7FFFFF, 0x800000, 0x7F7FFFFF]
        element = (st.integers(0, largest) | st.sampled_from(special)).map(lambda v: v & largest)
        bits = np.array(draw(st.lists(element, min_size=size, max_size=size)), dtype=np.int64)
        return finite(dtype, bits).reshape(height, width)
    k = draw(st.integers(-20, 6)) if dtype == torch.float16 else draw(st.integers(-130, 110))
    points = sorted({*E4M3, *((a + b) / 2 for a, b in zip(E4M3, E4M3[1:], strict=False))})
    element = st.tuples(st.sampled_from(points), st.sampled_from([-1, 1]), st.sampled_from([-1, 0, 1]))
    cells = draw(st.lists(element, min_size=size, max_size=size))
    values = [float(point) * sign for point, sign, _ in cells]
    x = torch.tensor(values, dtype=torch.float64).mul(2.0**k).to(dtype)
    x = x.view(INTEGERS[dtype]).add_(torch.tensor([n for *_, n in cells])).clamp_(min=torch.iinfo(INTEGERS[dtype]).min)
    x = x.view(dtype).nan_to_num(0.0, 0.0, 0.0).reshape(height, width)
    if draw(st.booleans()):
        x[0, 0] = 448.0 * 2.0**k
    return x


@settings(deadline=None, max_examples=400)
@given(
    x=matrices(),
    block=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    scale_format=st.sampled_from(["fp32", "pow2"]),
    eps=st.sampled_from([0.0, 1e-10, 0.5]),
)
@example(x=torch.tensor([[1e-38]], dtype=torch.bfloat16), block=(1, 1), scale_format="fp32", eps=0.0)
@example(x=torch.tensor([[1e-45, -1e-45]]), block=(1, 2), scale_format="fp32", eps=0.0)
@example(x=torch.tensor([[1e-45, -1e-40]]), block=(1, 2), scale_format="pow2", eps=0.0)
@example(x=torch.tensor([[0.0, -0.0]]), block=(1, 1), scale_format="pow2", eps=0.0)
@example(x=torch.tensor([[6e-8, 65504.0]], dtype=torch.float16), block=(1, 1), scale_format="fp32", eps=0.0)
@example(x=torch.tensor([[3.4028235e38]]), block=(8, 8), scale_format="fp32", eps=0.0)
def test_against_exact_arithmetic(x, block, scale_format, eps):
    """Subnormals, ties, overflowing scales, zeros, ragged blocks: every code and scale as the Fractions say."""
    q = quantize(x, block, scale_format=scale_format, eps=eps)
    assert_same_bits(q, *slow_quantize(x, block, scale_format, eps))
    # The activations' path (no check) has the same bits on finite data.
    again = quantize(x, block, scale_format=scale_format, eps=eps, check_finite=False)
    assert_same_bits(again, q.data.view(torch.uint8).tolist(), q.scale_inv.tolist())


def test_every_bfloat16_at_scale_one():
    """All 2^16 patterns up to 448 in one row whose s is 1: torch's vectorised cast against the table."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.abs() <= 448].reshape(1, -1)  # NaN compares false
    edges = np.array([float((a + b) / 2) for a, b in zip(E4M3, E4M3[1:], strict=False)])
    magnitude = x.double().abs().numpy()
    low, high = np.searchsorted(edges, magnitude, "left"), np.searchsorted(edges, magnitude, "right")
    expected = np.where(low % 2 == 0, low, high) | np.where(np.signbit(x.double().numpy()), 0x80, 0)
    for length in (x.shape[1], 37):  # whole vectors, then a remainder
        q = quantize(x[:, -length:].contiguous(), (1, x.shape[1]), eps=448.0)
        assert np.array_equal(q.data.view(torch.uint8).numpy(), expected[:, -length:])


def test_the_trap_of_dividing_a_scalar():
    """448.0 / amax in PyTorch is amax.reciprocal() * 448, one ulp off for many amax: quantize must not use it."""
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(0)).add_(0.01)
    exact = np.float32(448) / amax.numpy()
    assert (448.0 / amax).ne(torch.from_numpy(exact)).float().mean() > 0.1
    q = quantize(amax[:, None], (1, 1))
    assert np.array_equal(q.scale_inv[:, 0].numpy(), np.float32(1) / exact)


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (128, 1), (32, 48)])
@pytest.mark.parametrize("dtype", list(INTEGERS))
def test_chunks_and_strides_do_not_show(monkeypatch, block, dtype):
    """The same bits whole, in small chunks, transposed, and as a slice of something wider."""
    wide = torch.randn(300, 700, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    x = wide[:, 100:530]
    whole = quantize(x.clone(), block)
    monkeypatch.setattr(module, "CHUNK_CPU", 1)
    chunked = quantize(x, block)
    turned = quantize(x.t(), block[::-1])
    for other in (chunked, turned.t()):
        assert torch.equal(other.data.view(torch.uint8), whole.data.view(torch.uint8))
        assert torch.equal(other.scale_inv, whole.scale_inv)
    assert torch.equal(chunked.dequantize(), whole.dequantize())
    assert torch.equal(turned.dequantize().t(), whole.dequantize())


@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (0, 0)])
def test_empty(shape):
    """A microbatch may leave an expert or a rank without tokens."""
    q = quantize(torch.empty(shape, dtype=torch.bfloat16), (1, 128))
    assert q.data.shape == shape
    assert q.scale_inv.shape == (shape[0], shape[1] // 128)
    assert q.dequantize().shape == shape


def test_bad_weights_raise():
    """NaN or infinity in a weight: how many, and where the first is."""
    w = torch.zeros(300, 200, dtype=torch.bfloat16)
    w[130, 7], w[299, 199] = float("nan"), float("inf")
    with pytest.raises(DataError, match=r"2 values that are not finite, the first at \[130, 7\]: nan"):
        quantize(w, (128, 128))


@pytest.mark.parametrize("dtype", list(INTEGERS))
def test_bad_activations_follow_transformer_engine(dtype):
    """An infinity makes s 1 and saturates; a NaN stays out of amax (fmaxf) and becomes 0x7F (cvt.satfinite)."""
    nan = float("nan")
    x = torch.tensor([[inf, 1.0, -inf, 600.0], [nan, 2.0, -1.0, -nan], [nan] * 4, [1.0, 2.0, 3.0, 4.0]], dtype=dtype)
    q = quantize(x, (1, 4), check_finite=False)
    one = E4M3.index(1)
    assert q.data.view(torch.uint8).tolist() == [
        [0x7E, one, 0xFE, 0x7E],
        [0x7F, 0x7E, 0x80 | E4M3.index(224), 0x7F],
        [0x7F] * 4,
        quantize(x[3:], (1, 4)).data.view(torch.uint8)[0].tolist(),
    ]
    assert q.scale_inv[:3, 0].tolist() == [1.0, float(np.float32(1) / np.float32(224)), 1.0]
    assert q.dequantize()[1].isnan().tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3, 4), "shape"),
        (torch.zeros(4), "shape"),
        (torch.zeros(2, 2, dtype=torch.float64), "float64"),
        (torch.zeros(2, 2, dtype=torch.float8_e4m3fn), "float8"),
        (torch.zeros(2, 2, dtype=torch.int32), "int32"),
    ],
)
def test_what_is_not_a_matrix_of_floats(x, message):
    """Shapes and dtypes that no quantiser of the contract takes."""
    with pytest.raises(DataError, match=message):
        quantize(x, (1, 128))


def test_bad_arguments():
    """Unknown formats and empty blocks name their key."""
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.scale_format"):
        quantize(torch.zeros(2, 2), (1, 2), scale_format="auto")
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.weight_block"):
        quantize(torch.zeros(2, 2), (0, 2))


# -- dequantize --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("special", [None, 0.0, 1e-38, 6e4, inf, float("nan")])
def test_few_activations_are_quantised_as_many_are(monkeypatch, special, dtype, scale_format):
    """A decoding step's shorter way gives the general way's bits, and leaves blocks that are not ordinary to it."""
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(3)).mul(torch.logspace(-6, 3, 7)[:, None]).to(dtype)
    if special is not None:
        x[3, :128] = special
    few = quantize(x, (1, 128), scale_format=scale_format, check_finite=False)
    monkeypatch.setattr(module, "FEW", 0)
    many = quantize(x, (1, 128), scale_format=scale_format, check_finite=False)
    assert torch.equal(few.data.view(torch.uint8), many.data.view(torch.uint8))
    assert torch.equal(few.scale_inv, many.scale_inv)


@pytest.mark.parametrize("cut", [1, 64, 100, 128])
def test_a_block_cut_in_two_keeps_its_codes(cut):
    """Two shards of rows, quantised with their joined maxima, give the codes of the whole, wherever the cut lies."""
    x = torch.randn(200, 192, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    whole, rows = quantize(x, (128, 128)), torch.arange(200) < cut
    parts = [torch.where(rows[:, None] == side, x, 0.0) for side in (True, False)]
    bits = torch.maximum(*(amax_bits(part, (128, 128)) for part in parts))
    codes = [quantize(part, (128, 128), amax_bits=bits).data.view(torch.uint8) for part in parts]
    assert torch.equal(torch.cat([codes[0][:cut], codes[1][cut:]]), whole.data.view(torch.uint8))
    scale_inv = scale_inv_of(bits, torch.bfloat16, scale_format="fp32", eps=0.0)
    assert torch.equal(scale_inv, whole.scale_inv)


@pytest.mark.parametrize("repeats", [1, 3])
def test_every_code_decodes(repeats):
    """All 256 codes times an awkward scale, NaN included, against torch's own cast."""
    codes = torch.arange(256).repeat(repeats).to(torch.uint8).view(torch.float8_e4m3fn).reshape(1, -1)
    scale = torch.full((1, 1), 1 / 3)
    out = QuantizedTensor(codes, scale, (1, codes.shape[1])).dequantize()
    expected = codes.float() * scale
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dequantize_multiplies_in_float32(dtype):
    """Codes times scales in float32, then one cast, as TransformerEngine does."""
    q = quantize(torch.randn(130, 200, generator=torch.Generator().manual_seed(2)), (128, 128))
    assert torch.equal(q.dequantize(dtype), q.dequantize().to(dtype))
    full = q.scale_inv.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]
    assert torch.equal(q.dequantize(), q.data.float() * full)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", [(5, 300), (256, 128)], ids=str)
def test_a_whole_side_is_a_block_of_that_side(shape, scale_format):
    """One scale a tensor, a channel or a token: the bits of blocks of exactly that size, and shapes as vLLM's
    parameters."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    for block, sides, scales in (((WHOLE, WHOLE), shape, (1, 1)), ((1, WHOLE), (1, shape[1]), (shape[0], 1))):
        found, expected = (quantize(x, b, scale_format=scale_format) for b in (block, sides))
        assert found.block == block and found.scale_inv.shape == scales
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(found.scale_inv, expected.scale_inv)
        assert torch.equal(found.dequantize(), expected.dequantize())
        assert torch.equal(found.t().dequantize(), expected.dequantize().t())


def test_a_shard_of_a_tensor_keeps_its_scale():
    """Rows or columns of the codes with the tensor's one scale dequantise to the same rows or columns."""
    whole = quantize(torch.randn(8, 6, dtype=torch.bfloat16), (WHOLE, WHOLE))
    for part in (slice(2, 5), (slice(None), slice(3, 6))):
        shard = QuantizedTensor(whole.data[part].contiguous(), whole.scale_inv, whole.block)
        assert torch.equal(shard.dequantize(), whole.dequantize()[part])


@pytest.mark.parametrize("block", [(1, WHOLE), (WHOLE, WHOLE)], ids=str)
def test_no_tokens_have_no_scale(block):
    """A forward pass without tokens quantises nothing and fails nowhere."""
    empty = quantize(torch.empty(0, 16, dtype=torch.bfloat16), block, check_finite=False)
    assert empty.scale_inv.shape == (0, 1) and empty.dequantize().shape == (0, 16)
