"""``verl-fp8 report RUN...``: what runs did, side by side.

The figures come from verl's own logs: ``trainer.logger`` file or tensorboard.
"""

import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from verl_fp8.errors import DataError

# label -> (metric of verl's log, how a run's steps become one number, format)
ROWS = {
    "reward, first step": ("critic/rewards/mean", "first", ".3f"),
    "reward, last step": ("critic/rewards/mean", "last", ".3f"),
    "k3 KL trainer/rollout, median": ("rollout_corr/k3_kl", "median", ".2e"),
    "mean |log-prob difference|, median": ("fp8/abs_logp_diff_mean", "median", ".2e"),
    "largest |log-prob difference|": ("fp8/abs_logp_diff_max", "max", ".2e"),
    "AIS alpha, median": ("ais/alpha", "median", ".3f"),
    "AIS active, share of steps": ("ais/active", "mean", ".2f"),
    "weights' effective sample size, median": ("rollout_corr/rollout_is_eff_sample_size", "median", ".3f"),
    "tokens rejected, mean": ("rollout_corr/rollout_rs_masked_fraction", "mean", ".2%"),
    "sync bytes a weight of the FP8 layers": ("fp8/sync_bytes_per_weight", "last", ".3f"),
    "sync bytes": ("fp8/sync_bytes", "last", ",.0f"),
    "sync seconds, median": ("fp8/sync_seconds", "median", ".2f"),
    "seconds a step, median": ("timing_s/step", "median", ".1f"),
}

# heading -> title -> (metric, unit of the axis, logarithmic)
CHARTS = {
    "Learning": {
        "Reward": ("critic/rewards/mean", "reward", False),
        "Validation": (r"val-core/.*", "score", False),
        "Entropy": ("actor/entropy", "nats", False),
        "Gradient norm": ("actor/grad_norm", "norm", True),
        "Response length": ("response_length/mean", "tokens", False),
        "PPO clip fraction": ("actor/pg_clipfrac", "share", False),
    },
    "Mismatch of trainer and rollout": {
        "Mean |log-prob difference|": ("fp8/abs_logp_diff_mean", "nats", True),
        "Largest |log-prob difference|": ("fp8/abs_logp_diff_max", "nats", True),
        "KL, k3 estimator": ("rollout_corr/k3_kl", "nats a token", True),
        "chi squared, sequences": ("rollout_corr/chi2_seq", "", False),
    },
    "Correction": {
        "AIS alpha": ("ais/alpha", "", False),
        "alpha_ess: can the weights be trusted": ("ais/alpha_ess", "", False),
        "alpha_mis: is a correction needed": ("ais/alpha_mis", "", False),
        "alpha_var: does it inflate the gradient": ("ais/alpha_var", "", False),
        "AIS delta": ("ais/delta", "nats", False),
        "Change of the advantages by AIS": ("ais/advantage_change", "share of mean |A|", False),
        "Largest AIS weight": ("ais/weight_max", "weight", False),
        "verl's weights: effective sample size": ("rollout_corr/rollout_is_eff_sample_size", "share", False),
        "Tokens rejected": ("rollout_corr/rollout_rs_masked_fraction", "share", False),
    },
    "Speed": {
        "Seconds a step": ("timing_s/step", "s", False),
        "Throughput": ("perf/throughput", "tokens/s a GPU", False),
        "Sync seconds": ("fp8/sync_seconds", "s", False),
        "Sync bytes": ("fp8/sync_bytes", "bytes", False),
    },
}


def load(run: Path) -> list[dict[str, float]]:
    """The steps of a run: one dict of metrics each, with ``step``, ascending.

    Args:
        run: a .jsonl file, a TensorBoard event file, or a folder with one of either (metrics.jsonl first).

    Raises:
        DataError: no log, more than one, or one that cannot be read.
    """
    path = run
    if run.is_dir():
        found = [run / "metrics.jsonl"] if (run / "metrics.jsonl").exists() else sorted(run.glob("*.jsonl"))
        found = found or ([run] if list(run.glob("events.out.tfevents.*")) else [])
        if len(found) != 1:
            what = "none" if not found else ", ".join(p.name for p in found)
            raise DataError(
                f"the log of the run {run}",
                f"{what} among metrics.jsonl, *.jsonl, events.out.tfevents.*",
                "name the file",
            )
        path = found[0]
    if not path.exists():
        raise DataError(f"the log of the run {run}", "no such file or folder", "give a run's folder or log file")
    steps = _tensorboard(path) if path.is_dir() or ".tfevents." in path.name else _jsonl(path)
    if not steps:
        raise DataError(f"the log {path}", "no steps in it", "set trainer.logger=[console,file] and train")
    return sorted(steps, key=lambda s: s["step"])


def _jsonl(path: Path) -> list[dict[str, float]]:
    text = path.read_text(errors="replace")
    lines = text.split("\n")
    # A run that is still writing may have left half a line at the end. verl ends every finished line.
    lines.pop()
    steps = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            steps.append({**record["data"], "step": int(record["step"])})
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"the log {path}", f"line {number} that is none of verl's ({error})", "give verl's file log"
            ) from error
    return steps


def _tensorboard(path: Path) -> list[dict[str, float]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise DataError(f"the TensorBoard log {path}", "no package tensorboard", "pip install tensorboard") from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            steps[event.step] |= {tag: event.value, "step": event.step}
    return list(steps.values())


def series(steps: list[dict[str, float]], metric: str) -> tuple[list[int], list[float]]:
    """The steps that have a finite value of a metric, and the values."""
    having = [s for s in steps if isinstance(s.get(metric), int | float) and math.isfinite(s[metric])]
    return [s["step"] for s in having], [float(s[metric]) for s in having]


def reduce(steps: list[dict[str, float]], metric: str, how: str) -> float | None:
    """One number for a run's metric: its ``first``, ``last``, ``max``, ``median`` or ``mean``; None without a value."""
    _, values = series(steps, metric)
    if not values:
        return None
    return {
        "first": lambda v: v[0],
        "last": lambda v: v[-1],
        "max": max,
        "median": statistics.median,
        "mean": statistics.fmean,
    }[how](values)


def converted_line(run: Path) -> str | None:
    """``N of M``, the layers in FP8, as ``train.log`` beside the metrics has it; None if it does not."""
    log = run / "train.log"
    if not log.exists():
        return None
    found = re.search(r"FP8(?:: converted| rollout of) (\d+ of \d+)", log.read_text(errors="replace"))
    return found.group(1) if found else None


def table(
    runs: Mapping[str, list[dict[str, float]]], folders: Mapping[str, Path]
) -> dict[str, dict[str, float | str | None]]:
    """run's name -> label of :data:`ROWS` -> value.

    Args:
        runs: name -> steps, of :func:`load`.
        folders: name -> where its log is.
    """
    out = {}
    for name, steps in runs.items():
        values: dict[str, float | str | None] = {
            "steps": len(steps),
            "FP8 linear layers": converted_line(folders[name]),
        }
        values |= {label: reduce(steps, metric, how) for label, (metric, how, _) in ROWS.items()}
        out[name] = values
    return out


def formatted(found: Mapping[str, dict[str, float | str | None]]) -> list[list[str]]:
    """The rows of the printed table: a label, then a value for each run. A row without any value is left out."""
    formats = {label: spec for label, (_, _, spec) in ROWS.items()}
    rows = []
    for label in ("steps", "FP8 linear layers", *ROWS):
        values = [v[label] for v in found.values()]
        if any(v is not None for v in values):
            rows.append(
                [
                    label,
                    *(
                        "-" if v is None else v if isinstance(v, str) else format(v, formats.get(label, "d"))
                        for v in values
                    ),
                ]
            )
    return rows


def report_page(runs: Mapping[str, list[dict[str, float]]], rows: list[list[str]]) -> str:
    """The HTML page: the table, and a chart for each metric of :data:`CHARTS` that a run has.

    Args:
        runs: name -> steps.
        rows: of :func:`formatted`.
    """
    from verl_fp8.tools.page import colour_of_run, figure, line, page
    from verl_fp8.tools.page import table as html_table

    sections = [("Summary", "", [html_table(["", *runs], rows)])]
    known = {key for steps in runs.values() for step in steps for key in step}
    for heading, charts in CHARTS.items():
        figures = []
        for title, (pattern, unit, log) in charts.items():
            for metric in sorted(key for key in known if re.fullmatch(pattern, key)):
                chart = figure(title if metric == pattern else f"{title}: {metric}", "step", unit, log=log)
                for i, (name, steps) in enumerate(runs.items()):
                    line(chart, name, *series(steps, metric), colour_of_run(i))
                if chart.data:
                    chart.update_layout(showlegend=True)
                    figures.append(chart)
        if figures:
            sections.append((heading, "", figures))
    facts = ", ".join(f"{name}: {len(steps)} steps" for name, steps in runs.items())
    return page("Runs compared" if len(runs) > 1 else f"Run {next(iter(runs))}", facts, sections)


def report_command(paths: list[str], *, as_json: bool = False, html_path: str | None = None) -> int:
    """Print the table, or JSON, and write the page. Exit code 0, or 2 and one sentence if a run cannot be read."""
    names = _names(paths)
    try:
        runs = {name: load(Path(path)) for name, path in zip(names, paths, strict=True)}
        found = table(runs, {name: Path(path) for name, path in zip(names, paths, strict=True)})
        if html_path is not None:
            Path(html_path).write_text(report_page(runs, formatted(found)))
    except (OSError, DataError) as error:
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
    for row in formatted(found):
        view.add_row(*row)
    Console(width=max(80, 40 + 22 * len(found))).print(view)
    return 0


def _names(paths: list[str]) -> list[str]:
    """Short names that tell the runs apart."""
    short = [Path(p).resolve().name for p in paths]
    return [s if short.count(s) == 1 else p for s, p in zip(short, paths, strict=True)]
