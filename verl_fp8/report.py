"""``verl-fp8 report RUN...``: what runs did, from verl's own file log."""

import json
import math
import re
import statistics
from pathlib import Path

# label -> (metric of verl's log, how a run's steps become one number, format)
ROWS = {
    "reward, first step": ("critic/rewards/mean", "first", ".3f"),
    "reward, last step": ("critic/rewards/mean", "last", ".3f"),
    "k3 KL trainer/rollout, median": ("rollout_corr/k3_kl", "median", ".2e"),
    "mean |log-prob difference|, median": ("fp8/abs_logp_diff_mean", "median", ".2e"),
    "largest |log-prob difference|": ("fp8/abs_logp_diff_max", "max", ".2e"),
    "AIS alpha, median": ("ais/alpha", "median", ".3f"),
    "AIS active, share of steps": ("ais/active", "mean", ".2f"),
    "sync bytes a weight of the FP8 layers": ("fp8/sync_bytes_per_weight", "last", ".3f"),
    "sync bytes": ("fp8/sync_bytes", "last", ",.0f"),
    "sync seconds, median": ("fp8/sync_seconds", "median", ".2f"),
    "seconds a step, median": ("timing_s/step", "median", ".1f"),
}


def load(run: Path) -> list[dict[str, float]]:
    """The steps of a run: one dict of metrics each.

    Raises:
        FileNotFoundError, ValueError: no log, or a line that is none.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    steps = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if not steps:
        raise ValueError(f"{path} has no steps")
    return [s.get("data", s) for s in steps]


def reduce(steps: list[dict[str, float]], metric: str, how: str) -> float | None:
    """One number of a run's metric; None if the run has it not."""
    values = [s[metric] for s in steps if isinstance(s.get(metric), int | float) and math.isfinite(s[metric])]
    if not values:
        return None
    return {"first": lambda v: v[0], "last": lambda v: v[-1], "max": max, "median": statistics.median, "mean": statistics.fmean}[how](values)


def converted_line(run: Path) -> str | None:
    """The "converted N of M" line of the run's log."""
    log = run / "train.log"
    if not log.exists():
        return None
    found = re.search(r"FP8(?:: converted| rollout of) (\d+ of \d+)", log.read_text(errors="replace"))
    return found.group(1) if found else None


def table(runs: list[str]) -> dict[str, dict[str, float | str | None]]:
    """run name -> label -> value."""
    out = {}
    for name in runs:
        run = Path(name)
        steps = load(run)
        values: dict[str, float | str | None] = {"steps": len(steps), "FP8 linear layers": converted_line(run)}
        values |= {label: reduce(steps, metric, how) for label, (metric, how, _) in ROWS.items()}
        out[run.name] = values
    return out


def report_command(runs: list[str], *, as_json: bool = False) -> int:
    """Print the table; exit code 2 with one sentence if a run cannot be read."""
    import sys

    try:
        found = table(runs)
    except (OSError, ValueError) as error:
        print(f"verl-fp8 report: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    view = Table()
    view.add_column("")
    for name in found:
        view.add_column(name, justify="right")
    formats = {label: spec for label, (_, _, spec) in ROWS.items()}
    for label in ("steps", "FP8 linear layers", *ROWS):
        values = [v[label] for v in found.values()]
        if any(v is not None for v in values):
            view.add_row(label, *["-" if v is None else v if isinstance(v, str) else format(v, formats.get(label, "d")) for v in values])
    Console(width=max(80, 40 + 22 * len(found))).print(view)
    return 0
