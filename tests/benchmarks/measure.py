"""Timing in turns, and one measured figure."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Result:
    """One figure.

    Attributes:
        work: what was measured.
        against: what it is compared with.
        value: the figure.
        unit: ``x`` for a ratio, else as it says.
        target: the limit; None where there is none.
        at_most: whether ``target`` is an upper limit.
        detail: what else to know, in words.
        figures: everything behind it.
    """

    work: str
    against: str
    value: float | None
    unit: str = "x"
    target: float | None = None
    at_most: bool = True
    detail: str = ""
    figures: dict = field(default_factory=dict)

    def shown(self) -> str:
        """The figure with its unit."""
        return "-" if self.value is None else f"{self.value:.3g}{'' if self.unit == 'x' else ' '}{self.unit}"

    def goal(self) -> str:
        """The target in words."""
        return "" if self.target is None else f"{'<=' if self.at_most else '>='} {self.target:g}"

    def verdict(self) -> str:
        """``met``, ``not met`` or nothing."""
        if self.target is None or self.value is None:
            return ""
        return "met" if (self.value <= self.target) == self.at_most or self.value == self.target else "not met"


def in_turns(*works: Callable[[], object], repeats: int = 15, warm: int = 2) -> list[list[float]]:
    """Seconds of each work, ``repeats`` times, in turns."""
    times: list[list[float]] = [[] for _ in works]
    gc.collect()
    for turn in range(warm + repeats):
        for work, found in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            if turn >= warm:
                found.append(time.perf_counter() - start)
    return times


def ratio(ours: Callable[[], object], theirs: Callable[[], object], **kwargs) -> tuple[float, dict]:
    """(median of ours over median of theirs, the medians and fastest in milliseconds)."""
    a, b = in_turns(ours, theirs, **kwargs)
    median = statistics.median
    figures = {
        "ours_ms": median(a) * 1e3,
        "theirs_ms": median(b) * 1e3,
        "ours_min_ms": min(a) * 1e3,
        "theirs_min_ms": min(b) * 1e3,
    }
    return median(a) / median(b), figures


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that ``work`` held at once beyond what it was given: its results are included."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    del result
    events = sorted(
        (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    )
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def slope(sizes: list[int], times: list[float]) -> float:
    """Exponent b of times = a * sizes^b, least squares on logarithms; 1 is linear."""
    x, y = torch.tensor(sizes).double().log(), torch.tensor(times).double().log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
