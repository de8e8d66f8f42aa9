"""The figures of ``verl-fp8 replay``: what weights do to one batch, and to a whole dump.

All are over valid tokens. With w the weight a method gives a token (0 where it rejects it), rho the untruncated token
ratio and A the advantage:

    ess        (sum w)^2 / (n sum w^2)                 1 for equal weights; the table has the median over steps
    bias       sum |w - rho| |A| / sum |A|             distance from the token-level importance-sampling gradient
    variance   sum (w A)^2 / sum A^2                   growth of the gradient's second moment

bias and variance are proxies: they take the size of a token's gradient to be that of its advantage. A rejected token
counts as weight 0 because verl divides its loss by all tokens, the rejected ones among them (loss_mask in
verl/workers/engine/fsdp/transformer_impl.py). The bias of ``none`` is what leaving the mismatch alone costs.
"""

import itertools
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_fp8.correction.ais import AISConfig, alpha_parts
from verl_fp8.correction.dump import DumpStep

# Elements of a chunk: a few float64 temporaries of 8 MiB each.
_BLOCK = 1 << 20

# Bins of ln(weight): 0.25 % apart, over verl's and our own range of ratios; an odd number, so that 1 is the middle of
# one.
_LOG_BOUND, _BINS = 20.0, 16001


@dataclass
class Totals:
    """What a method did over all steps.

    Attributes:
        n, kept, clipped, zeroed: valid tokens; those not rejected; those truncated; the kept ones of weight 0.
        weight, bias, second, advantage, advantage_square: sums of w, |w - rho| |A|, (w A)^2, |A| and A^2.
        largest: weight.
        histogram: of ln(weight) of the kept tokens.
    """

    n: int = 0
    kept: int = 0
    clipped: int = 0
    zeroed: int = 0
    weight: float = 0.0
    largest: float = 0.0
    bias: float = 0.0
    second: float = 0.0
    advantage: float = 0.0
    advantage_square: float = 0.0
    histogram: torch.Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))

    def add(self, sums: dict[str, float], positive: torch.Tensor, **counts: int) -> None:
        """Add a batch.

        Args:
            sums: its sums over tokens, by the names of the fields.
            positive: the kept tokens' weights above 0.
            counts: n, kept, clipped and zeroed tokens.
        """
        added = counts | {name: sums[name] for name in ("weight", "bias", "second", "advantage", "advantage_square")}
        for name, value in added.items():
            setattr(self, name, getattr(self, name) + value)
        if positive.numel():
            self.histogram += torch.histc(positive.log(), bins=_BINS, min=-_LOG_BOUND, max=_LOG_BOUND).double()
            self.largest = max(self.largest, positive.max().item())

    def quantile(self, q: float) -> float | None:
        """Upper quantile of the kept tokens' weights, to a quarter of a per cent."""
        n = int(self.histogram.sum()) + self.zeroed
        if n == 0:
            return None
        index = int(torch.searchsorted(self.histogram.cumsum(0), q * n - self.zeroed))
        return math.exp((min(index, _BINS - 1) + 0.5) * 2 * _LOG_BOUND / _BINS - _LOG_BOUND)


def batch_figures(
    step: DumpStep, weights: torch.Tensor, kept: torch.Tensor, clip: float | None, totals: Totals
) -> dict[str, float | None]:
    """The figures of one method on one batch (see the module's docstring); also adds them to `totals`.

    Args:
        step: the batch.
        weights, kept: of :func:`verl_fp8.tools.runs.replay.weigh`.
        clip: the method's upper truncation, None without one.
        totals: of the method.
    """
    mask = step.tensors["response_mask"].bool()
    n, n_kept = int(mask.sum()), int(kept.sum())
    if n == 0:
        return {}
    share = n_kept / n
    sums = dict.fromkeys(("weight", "square", "bias", "second", "advantage", "advantage_square"), 0.0)
    clipped = 0
    for start in range(0, step.n_tokens, _BLOCK):
        part = slice(start, start + _BLOCK)
        valid = mask[part]
        w = (weights[part] * kept[part])[valid].double()
        a = step.tensors["advantages"][part][valid].double()
        rho = (step.tensors["old_log_probs"][part] - step.tensors["rollout_log_probs"][part])[valid].double()
        rho = rho.clamp_(-_LOG_BOUND, _LOG_BOUND).exp_()
        sums["weight"] += w.sum().item()
        sums["square"] += w.square().sum().item()
        if clip is not None:
            clipped += int((weights[part][kept[part]] >= torch.tensor(clip, dtype=torch.float32)).sum())
        sums["advantage"] += a.abs().sum().item()
        sums["advantage_square"] += a.square().sum().item()
        sums["bias"] += ((w - rho).abs() * a.abs()).sum().item()
        sums["second"] += (w * a).square().sum().item()
    of_kept = weights[kept]
    positive = of_kept[of_kept > 0]
    zeroed = n_kept - positive.numel()
    totals.add(sums, positive, n=n, kept=n_kept, clipped=clipped, zeroed=zeroed)
    top = of_kept.topk(n_kept // 100 + 1).values if n_kept else of_kept
    at = lambda rank: top[rank].item() if n_kept else None
    return {
        "ess": sums["weight"] ** 2 / (n * sums["square"]) if sums["square"] else 0.0,
        "weight_mean": sums["weight"] / n,
        "weight_p99": at(n_kept // 100),
        "weight_p999": at(n_kept // 1000),
        "weight_max": at(0),
        "clip_fraction": (clipped + zeroed) / n,
        "rejected_fraction": 1.0 - share,
        "bias": sums["bias"] / sums["advantage"] if sums["advantage"] else None,
        "variance": sums["second"] / sums["advantage_square"] if sums["advantage_square"] else None,
    }


def mismatch_figures(step: DumpStep) -> dict[str, float | None]:
    """How far trainer and rollout are apart on one batch; d is the difference of their log-probs, in nats.

    Returns:
        The mean of |d| and its tail; k1 = mean(-d) and k3 = mean(exp(d) - d - 1), estimators of KL(rollout || trainer);
        how many tokens and responses; the mean score. Nothing if no token is valid.
    """
    mask = step.tensors["response_mask"].bool()
    d = (step.tensors["old_log_probs"] - step.tensors["rollout_log_probs"])[mask]
    n = d.numel()
    if n == 0:
        return {}
    top = d.abs().topk(n // 100 + 1).values
    sums = [
        (c.abs().sum(), c.sum(), (c.clamp(-_LOG_BOUND, _LOG_BOUND).exp() - c - 1).sum())
        for c in map(torch.Tensor.double, d.split(_BLOCK))
    ]
    absolute, signed, k3 = (sum(part[i].item() for part in sums) / n for i in range(3))
    scores = step.tensors["scores"]
    return {
        "mean_abs": absolute,
        "p99": top[n // 100].item(),
        "p999": top[n // 1000].item(),
        "max": top[0].item(),
        "k1": -signed,
        "k3": k3,
        "n_tokens": float(n),
        "n_responses": float(scores.numel()),
        "score_mean": scores.double().mean().item() if scores.numel() else None,
    }


class Profile:
    """Sums by some index of a token (its position, its response's length): the mismatch and what alpha is made of."""

    NAMES = ("n", "abs", "k3", "excess", "excess2", "a", "a2", "wa", "wa2")

    def __init__(self, config: AISConfig) -> None:
        self.config = config
        self.sums = torch.zeros(len(self.NAMES), 0, dtype=torch.float64)

    def add(self, index: torch.Tensor, d: torch.Tensor, a: torch.Tensor) -> None:
        """Add valid tokens: their index, int64, log-prob difference and advantage, float64; all flat."""
        if index.numel() == 0:
            return
        size = max(self.sums.shape[1], int(index.max()) + 1)
        rho = d.clamp(-_LOG_BOUND, _LOG_BOUND).exp()
        wbar = rho.clamp(max=self.config.clip)
        values = (
            torch.ones_like(d),
            d.abs(),
            rho - d - 1,
            wbar - 1,
            (wbar - 1) ** 2,
            a,
            a * a,
            wbar * a,
            (wbar * a) ** 2,
        )
        grown = torch.zeros(len(self.NAMES), size, dtype=torch.float64)
        grown[:, : self.sums.shape[1]] = self.sums
        for row, value in enumerate(values):
            grown[row] += torch.bincount(index, weights=value, minlength=size)
        self.sums = grown

    def bins(self, edges: list[int]) -> list[dict[str, float]]:
        """The figures of the index ranges between consecutive `edges`, the empty ones left out: ``from``, ``to`` (not
        included), ``n_tokens``, ``mean_abs``, ``k3``, and alpha and its parts as if these tokens were a batch."""
        out = []
        for low, high in itertools.pairwise(edges):
            s = dict(zip(self.NAMES, self.sums[:, low:high].sum(1).tolist(), strict=True))
            n = s["n"]
            if n == 0:
                continue
            std = lambda total, square, n=n: math.sqrt(max(0.0, square - total * total / n) / (n - 1)) if n > 1 else 0.0
            spread = std(s["a"], s["a2"])
            ratio = std(s["wa"], s["wa2"]) / (spread + self.config.eps) if spread else 1.0
            parts = alpha_parts(
                s["abs"] / n, std(s["excess"], s["excess2"]) / (1 + s["excess"] / n), ratio, self.config
            )
            out.append({"from": low, "to": high, "n_tokens": n, "mean_abs": s["abs"] / n, "k3": s["k3"] / n, **parts})
        return out


def add_profiles(step: DumpStep, by_position: Profile, by_length: Profile) -> None:
    """Add one batch to both profiles."""
    lengths = step.tensors["lengths"].long()
    starts = lengths.cumsum(0) - lengths
    row = torch.arange(lengths.numel()).repeat_interleave(lengths)
    for start in range(0, step.n_tokens, _BLOCK):
        part = slice(start, start + _BLOCK)
        valid = step.tensors["response_mask"][part].bool()
        d = (step.tensors["old_log_probs"][part] - step.tensors["rollout_log_probs"][part])[valid].double()
        a, rows = step.tensors["advantages"][part][valid].double(), row[part][valid]
        position = torch.arange(start, start + valid.numel())[valid] - starts[rows]
        by_position.add(position, d, a)
        by_length.add(lengths[rows], d, a)


def coarse_histograms(histograms: dict[str, torch.Tensor], bins: int = 81) -> dict[str, Any]:
    """The weights' distributions for a plot, in bins of equal ratio that cover them all: ``weight``, the bins' edges,
    and ``tokens``, the counts of each method."""
    log = torch.linspace(-_LOG_BOUND, _LOG_BOUND, _BINS + 1, dtype=torch.float64)[:-1] + _LOG_BOUND / _BINS
    reach = max(
        [0.02, *(float(log[h > 0].abs().max()) + 2 * _LOG_BOUND / _BINS for h in histograms.values() if bool(h.any()))]
    )
    index = ((log + reach) / (2 * reach) * bins).floor().clamp(0, bins - 1).long()
    counts = {name: torch.bincount(index, weights=h, minlength=bins).tolist() for name, h in histograms.items()}
    return {"weight": torch.linspace(-reach, reach, bins + 1).exp().tolist(), "tokens": counts}


def run_figures(totals: Totals, steps: list[dict[str, Any]]) -> dict[str, float | None]:
    """A method's figures for the whole dump, pooled over the tokens of all steps. ess and alpha are medians over steps.

    Args:
        totals: what :func:`batch_figures` added up.
        steps: the figures of each batch.
    """
    n = max(1, totals.n)
    median = lambda key: statistics.median(v) if (v := [s[key] for s in steps if s.get(key) is not None]) else None
    return {
        "ess": median("ess"),
        "weight_mean": totals.weight / n,
        "weight_p99": totals.quantile(0.99),
        "weight_p999": totals.quantile(0.999),
        "weight_max": totals.largest,
        "clip_fraction": (totals.clipped + totals.zeroed) / n,
        "rejected_fraction": 1.0 - totals.kept / n,
        "bias": totals.bias / totals.advantage if totals.advantage else None,
        "variance": totals.second / totals.advantage_square if totals.advantage_square else None,
        "alpha": median("ais/alpha"),
    }


# Column of the table -> key of run_figures, format.
COLUMNS = {
    "ESS": ("ess", ".4f"),
    "mean w": ("weight_mean", ".4f"),
    "w p99": ("weight_p99", ".3f"),
    "w p99.9": ("weight_p999", ".3f"),
    "w max": ("weight_max", ".3f"),
    "clipped": ("clip_fraction", ".3%"),
    "rejected": ("rejected_fraction", ".1%"),
    "bias": ("bias", ".4f"),
    "variance": ("variance", ".4f"),
    "alpha": ("alpha", ".3f"),
}


def table_row(figures: dict[str, Any]) -> list[str]:
    """A method's row of the table: its :func:`run_figures`, formatted, in the order of :data:`COLUMNS`."""
    return ["-" if figures[key] is None else format(figures[key], spec) for key, spec in COLUMNS.values()]
