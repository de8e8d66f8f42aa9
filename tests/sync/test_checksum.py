"""The digest that both ends of a weight sync compare."""

import numpy as np
import pytest
import torch

from verl_fp8.sync.checksum import ROW, checksum, keys, sums, sums_on_cpu


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_checksum_sees_every_bit(dtype):
    """One changed element, another dtype or another shape changes it; strides do not."""
    t = torch.zeros(6, 8, dtype=dtype)
    other = t.clone()
    other[3, 4] = 1
    seen = {checksum(v) for v in (t, other, t.reshape(8, 6), t.view(torch.uint8)[:, :8])}
    assert len(seen) == 4
    assert checksum(other.t().contiguous().t()) == checksum(other)
    assert checksum(other[:, ::2]) == checksum(other[:, ::2].clone())
    assert len(checksum(torch.empty(0, dtype=dtype))) == 32
    assert len(checksum(torch.zeros((), dtype=dtype))) == 32


@pytest.mark.parametrize("bits", [1, 1 << 31], ids=["lowest", "highest"])
def test_checksum_sees_words_that_cancel_or_change_places(bits):
    """Over more than one row of keys: two words with one bit flipped each, and two that are exchanged."""
    t = torch.arange(200_003, dtype=torch.int32)
    flip = torch.tensor([bits], dtype=torch.int64).to(torch.int32)
    seen = {checksum(t)}
    for one, other in ((3, 5), (3, 3 + (1 << 16)), (3, 200_000)):
        flipped, exchanged = t.clone(), t.clone()
        flipped[[one, other]] ^= flip
        exchanged[[one, other]] = t[[other, one]]
        seen |= {checksum(flipped), checksum(exchanged)}
    assert len(seen) == 7


@pytest.mark.parametrize("size", [0, 1, 3, 4, 262_143, 262_144, 262_147, 600_001])
def test_checksum_of_bytes_at_any_place(size):
    """Sizes around words and rows; a view at an odd place of a bucket, as the receiver holds it, is its copy."""
    generator = torch.Generator().manual_seed(size)
    bucket = torch.randint(0, 256, (size + 3,), dtype=torch.uint8, generator=generator)
    assert checksum(bucket[3:]) == checksum(bucket[3:].clone())
    if size:
        other = bucket.clone()
        other[-1] ^= 1
        assert checksum(other[3:]) != checksum(bucket[3:])


def test_checksum_tells_negative_zero():
    """Bits, not values."""
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


@pytest.mark.parametrize("size", [0, 1, ROW - 1, ROW, ROW + 1, 66 * ROW + 5])
def test_every_device_has_the_same_sums(size):
    """What an accelerator computes, run by torch on CPU, is what numpy computes, and is the sum in Python's
    integers."""
    words = torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32, generator=torch.Generator().manual_seed(size))
    found = sums(words)
    assert np.array_equal(found, sums_on_cpu(words)) and found.dtype == np.int64
    last = words[size // ROW * ROW :].tolist()
    exact = sum(word * key for word, key in zip(last, keys().tolist(), strict=False))
    assert int(found[-1]) % 2**64 == exact % 2**64
    assert (keys() & 1).all() and len(np.unique(keys())) == ROW
