"""Moments and upper quantiles of a stream, block by block in fixed memory: what AIS reads off a batch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The histogram behind the quantiles: from 2**_LOW to 2**_HIGH nats, 2**_STEPS bins to a doubling.
_LOW, _HIGH, _STEPS = -18, 6, 10


@dataclass
class Moments:
    """Mean and sum of squared deviations of a stream, merged block by block (Chan, Golub and LeVeque 1983).

    Order and cut into blocks change no more than float64 rounding, whatever the mean.
    """

    n: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def add(self, values: Tensor, keep: Tensor, n: int, total: float) -> None:
        """Add the `n` > 0 float64 values, of sum `total`, where `keep` is 1; both flat, `values` 0 elsewhere."""
        mean = total / n
        squares = torch.dot(values, values).item()
        m2 = squares - n * mean * mean
        if m2 < 1e-3 * squares:  # above it, cancellation costs at most 3 of float64's 16 digits
            centred = torch.sub(values, keep, alpha=mean)
            m2 = torch.dot(centred, centred).item()
        delta, self.n = mean - self.mean, self.n + n
        self.mean += delta * (n / self.n)
        self.m2 += m2 + delta * delta * ((self.n - n) * n / self.n)

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 where it is undefined."""
        return math.sqrt(self.m2 / (self.n - 1)) if self.n > 1 else 0.0


class Quantiles:
    """Upper quantiles of a stream of non-negative float32, in fixed memory and independent of its order.

    Selecting exactly costs half as much as all the rest. The bits of a non-negative float grow with its value, so the
    upper ones are a ready-made logarithmic bin; the relative error is half a bin, 2**-(_STEPS + 1) = 0.05 %.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(((_HIGH - _LOW) << _STEPS) + 1, dtype=torch.int64, device=device)

    def add(self, values: Tensor) -> None:
        """Count flat `values`, and overwrite them."""
        bins = values.clamp_(2.0**_LOW, 2.0**_HIGH).view(torch.int32)
        bins.bitwise_right_shift_(23 - _STEPS).sub_((127 + _LOW) << _STEPS)
        self.counts += bins.bincount(minlength=self.counts.numel())

    def from_top(self, rank: int) -> float:
        """The value with `rank` values above it; 0 in the lowest bin and where there are no values."""
        above = self.counts.flip(0).cumsum(0)
        index = self.counts.numel() - 1 - int(torch.searchsorted(above, rank, right=True))
        if index <= 0:
            return 0.0
        exponent, step = divmod(index, 1 << _STEPS)
        return 2.0 ** (_LOW + exponent) * (1.0 + (step + 0.5) / (1 << _STEPS))
