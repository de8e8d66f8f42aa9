"""What the figures of ``verl-fp8 certify`` may be."""

import copy

import pytest

from verl_fp8.tools.mismatch.bands import BANDS, FLOOR_FACTOR, judge, worst


def figures(k3: float, floor: float, exact: bool = False, largest: float = 0.0, differ: int = 0, repeat: float = 0.0):
    """What judge() reads."""
    quiet = {"mean": 0.0, "max": 0.0, "k3": 0.0}
    noise = {
        "trainer again": quiet | {"max": repeat},
        "trainer in another batch": quiet,
        "rollout prefill against decode": quiet,
    }
    if not exact:
        noise["trainer with another attention"] = quiet | {"k3": floor}
    total = {"mean": 0.0, "max": largest, "k3": k3}
    return {"exact": exact, "total": total, "noise": noise, "weights": {"differ": differ, "tensors": 9}}


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (figures(0.001, 0.0), "pass"),
        (figures(0.003, 0.0), "warn"),
        (figures(0.02, 0.001), "fail"),
        (figures(0.02, 0.02 / FLOOR_FACTOR), "warn"),  # this model amplifies any rounding that much
        (figures(float("nan"), 1.0), "fail"),
        (figures(0.0, 0.0, differ=1), "fail"),
        (figures(0.0, 0.0, repeat=1e-3), "warn"),
        (figures(0.0, 0.0, exact=True), "pass"),
        (figures(0.0, 0.0, exact=True, largest=9.5e-7), "warn"),
        (figures(0.0, 0.0, exact=True, largest=1e-4), "fail"),
    ],
)
def test_the_bands(found, verdict):
    """Each figure against its band; the worst decides; the floor excuses a mismatch, never wrong weights."""
    judged = judge(copy.deepcopy(found))
    assert worst(judged) == verdict
    assert all(j["source"] for j in judged) and all(band.source for band in BANDS.values())
