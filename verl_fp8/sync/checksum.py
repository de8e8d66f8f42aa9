"""One digest of a tensor's bytes for both ends of the weight sync, taken where the tensor lies."""

import functools
import hashlib

import numpy as np
import torch

# Keys, and so words in a sum; a row of products (512 KiB) stays in the L2 cache.
ROW = 1 << 16
# Rows of products an accelerator holds at once (32 MiB).
ROWS = 64


def checksum(t: torch.Tensor) -> str:
    """A digest of dtype, shape and bytes: equal for bit-equal tensors, of any strides, on any devices.

    The bytes are summed as 32-bit words times fixed odd 64-bit keys, modulo 2^64 (multilinear hashing: Lemire and Kaser
    2014); one sum a row of 2^16 words leaves the device, and the digest is SHA-256 of these. One changed word is always
    seen, any other change but for a chance of 2^-32. It is meant against faults, not against forgers: SHA-256 of all
    bytes takes 2.5 times as long on CPUs, and would bring a GPU's weights to the host.
    """
    data = t.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()  # words must be aligned
    count = data.numel() // 4
    words, rest = data[: count * 4].view(torch.int32), data[count * 4 :].cpu().numpy()
    row_sums = sums_on_cpu(words) if t.device.type == "cpu" else sums(words)
    digest = hashlib.sha256(f"{t.dtype}{tuple(t.shape)}".encode())
    digest.update(row_sums.tobytes())
    digest.update(rest.tobytes())
    return digest.hexdigest()[:32]


def sums(words: torch.Tensor) -> np.ndarray:
    """[rows] int64, of int32 words on any device."""
    key, whole = torch.from_numpy(keys()).to(words.device), words.numel() // ROW * ROW
    rows = [torch.mul(part.to(torch.int64), key).sum(1) for part in words[:whole].view(-1, ROW).split(ROWS)]
    last = words[whole:].to(torch.int64)
    return torch.cat([*rows, torch.mul(last, key[: last.numel()]).sum(0, keepdim=True)]).cpu().numpy()


def sums_on_cpu(words: torch.Tensor) -> np.ndarray:
    """The same by numpy, whose 64-bit products are six times as fast as torch's."""
    key, products, flat = keys(), np.empty(ROW, np.int64), words.numpy()
    rows = []
    for start in range(0, len(flat) // ROW * ROW + 1, ROW):
        row = flat[start : start + ROW]
        rows.append(np.multiply(row, key[: len(row)], out=products[: len(row)]).sum())
    return np.array(rows, np.int64)


@functools.cache
def keys() -> np.ndarray:
    """[ROW] odd int64, by SplitMix64 (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        z = np.arange(1, ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)
