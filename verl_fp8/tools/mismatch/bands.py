"""The bands that the figures of ``verl-fp8 certify`` are judged by, and where each comes from."""

from dataclasses import dataclass
from typing import Any

_PUBLISHED = (
    "passes: NeMo-RL's nightly gate of gen_kl_error, 0.0014 to 0.0018; warns: prime-rl's mismatch KL on Hopper, 0.0059"
)

# A mismatch beyond the published bands, which are of models from 8B on, only warns up to this multiple of what the same
# trainer shows against itself with another attention implementation. Repeated measurements on SmolLM2-135M gave 1.0 to
# 1.3.
FLOOR_FACTOR = 2.0
# The bands that know this excuse.
_EXCUSED = ("mismatch", "trainer noise", "rollout noise")


@dataclass(frozen=True)
class Band:
    """What a figure may be.

    Attributes:
        name: of the figure.
        passes, warns: the largest value that passes, and that only warns.
        source: where the two come from.
    """

    name: str
    passes: float
    warns: float
    source: str

    def verdict(self, value: float) -> str:
        """``pass``, ``warn`` or ``fail``; a value that is not finite fails."""
        return "pass" if value <= self.passes else "warn" if value <= self.warns else "fail"


BANDS = {
    "mismatch": Band("k3 of trainer against rollout", 0.0018, 0.0059, _PUBLISHED),
    "exact": Band(
        "largest |log-prob difference| of trainer and rollout (fp8.exact)",
        0.0,
        1e-6,
        "passes: equal forwards have none; warns: one float32 ulp of a log-prob of about 10",
    ),
    "weights": Band(
        "tensors the rollout holds with other bytes than the trainer's",
        0.0,
        0.0,
        "the sync ships the trainer's bytes",
    ),
    "repeat": Band(
        "largest |log-prob difference| of the trainer with itself, same batch",
        0.0,
        float("inf"),
        "a deterministic forward has none",
    ),
    "trainer noise": Band("k3 of the trainer with itself in another batch", 0.0018, 0.0059, _PUBLISHED),
    "rollout noise": Band("k3 of the rollout's prefill against its own decoding", 0.0018, 0.0059, _PUBLISHED),
}


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Every figure against its band: name, value, verdict, the band's limits and source.

    Args:
        found: of :func:`verl_fp8.tools.mismatch.certify.certify`: ``exact``, ``total``, ``weights`` and ``noise``.
    """
    noise = found["noise"]
    values = {
        "exact" if found["exact"] else "mismatch": found["total"]["max" if found["exact"] else "k3"],
        "weights": found["weights"]["differ"],
        "repeat": noise["trainer again"]["max"],
        "trainer noise": noise["trainer in another batch"]["k3"],
        "rollout noise": noise["rollout prefill against decode"]["k3"],
    }
    floor = noise.get("trainer with another attention", {}).get("k3", 0.0)
    judged = []
    for key, value in values.items():
        band, note = BANDS[key], ""
        verdict = band.verdict(value)
        if verdict == "fail" and key in _EXCUSED and value <= FLOOR_FACTOR * floor:
            verdict = "warn"
            note = (
                f"within {FLOOR_FACTOR:g} times this model's own floor, {floor:.2g} "
                "(the trainer against itself with another attention)"
            )
        limits = {"passes": band.passes, "warns": band.warns, "source": band.source}
        judged.append({"name": band.name, "value": value, "verdict": verdict, **limits, "note": note})
    return judged


def worst(judgements: list[dict[str, Any]]) -> str:
    """The verdict on all: the worst of theirs."""
    return max((j["verdict"] for j in judgements), key=("pass", "warn", "fail").index)
