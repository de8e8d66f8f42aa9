"""``verl-fp8 replay DUMP``: what each correction would have done to the batches of a run.

Reads what ``is_correction.dump`` wrote, file by file, and computes every method on the same log-probs and advantages:
verl's own methods by verl's own functions, AIS by ours. It holds one batch in memory.
:mod:`verl_fp8.tools.runs.figures` says what the figures are.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import verl_fp8
from verl_fp8.correction.ais import ais_weights
from verl_fp8.correction.dump import DumpStep, files, read_header, read_step
from verl_fp8.correction.reweight import AISState, ais_config
from verl_fp8.correction.verls_methods import rollout_correction
from verl_fp8.errors import ConfigError, DataError, Fp8Error
from verl_fp8.switches.settings import METHOD_KEYS, CorrectionSettings
from verl_fp8.tools.runs.figures import (
    COLUMNS,
    Profile,
    Totals,
    add_profiles,
    batch_figures,
    coarse_histograms,
    mismatch_figures,
    run_figures,
    table_row,
)

SCHEMA = "verl_fp8.replay/1"

# Elements of the padded blocks handed to verl's functions, which make some ten float32 temporaries of them.
_BLOCK = 1 << 20


def methods(overrides: list[str], own: dict[str, Any] | None = None) -> dict[str, CorrectionSettings]:
    """The methods to compare: every group of ``conf/is_correction`` and AIS with ``delta=auto``.

    Args:
        overrides: ``method.key=value``, e.g. ``tis.clip=3``.
        own: the ``is_correction`` node of the run itself; its method is taken with the run's own values.

    Raises:
        ConfigError: an unknown method or key, or a wrong value.
    """
    nodes = {"none": {"method": "none"}}
    for method in [m for m in METHOD_KEYS if m not in ("none", "ais")] + ["ais"]:
        path = Path(verl_fp8.__file__).parent / "conf" / "is_correction" / f"{method}.yaml"
        nodes[method] = OmegaConf.to_container(OmegaConf.load(path).is_correction)
    if own is not None:
        method = CorrectionSettings.parse(own).method
        # Which rows shared an alpha is not in a dump: replay takes whole batches.
        keep = ("method", *METHOD_KEYS[method], *(("delta_factor", "delta_steps") if method == "ais" else ()))
        nodes[method] = {key: own[key] for key in keep if key in own}
    nodes["ais_auto"] = nodes["ais"] | {"delta": "auto"}
    for override in overrides:
        path, equals, value = override.partition("=")
        name, dot, key = path.partition(".")
        if name not in nodes or not (dot and equals and key):
            raise ConfigError(f"--set {override}", "not method.key=value", f"use one of the methods {', '.join(nodes)}")
        try:
            nodes[name][key] = OmegaConf.create(f"value: {value}")["value"]
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(
                f"--set {override}", f"{value!r} is no YAML value", "write --set method.key=value"
            ) from error
    return {name: CorrectionSettings.parse(node) for name, node in nodes.items()}


def weigh(
    step: DumpStep, settings: CorrectionSettings, state: AISState
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """One method on one batch.

    Args:
        step: the batch.
        settings: the method and its parameters.
        state: what AIS carries from batch to batch.

    Returns:
        Weights, float32 (tokens), 1 under the mask; which valid tokens are kept, bool (tokens); and for AIS its
        metrics.
    """
    mask = step.tensors["response_mask"].bool()
    weights = torch.ones(step.n_tokens)
    if settings.method == "none":
        return weights, mask, {}
    if settings.method == "ais":
        result = _ais(step, mask, settings, state)
        return torch.where(mask, result[0], 1.0), mask, result[1]
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

    verl, kept = rollout_correction(settings), mask.clone()
    # Weights and rejections are row by row in verl, but for the normalisation by the batch's mean.
    limit = math.inf if verl.get("rollout_is_batch_normalize") else _BLOCK
    for flat, inside, block in step.row_blocks(limit):
        log_ratio, valid = block["old_log_probs"] - block["rollout_log_probs"], block["response_mask"].float()
        if not bool(valid.any()):
            continue
        if verl["rollout_is"] is not None:
            arguments = {k: verl[k] for k in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")}
            weights[flat] = compute_rollout_correction_weights(log_ratio, valid, **arguments)[0][inside]
        if verl["rollout_rs"] is not None:
            arguments = {k: verl[k] for k in ("rollout_rs", "rollout_rs_threshold")}
            kept[flat] &= compute_rollout_rejection_mask(log_ratio, valid, **arguments)[0][inside] > 0
    return torch.where(mask, weights, 1.0), kept, {}


def _ais(
    step: DumpStep, mask: torch.Tensor, settings: CorrectionSettings, state: AISState
) -> tuple[torch.Tensor, dict[str, float]]:
    difference = (step.tensors["old_log_probs"] - step.tensors["rollout_log_probs"])[mask].abs()
    mean = difference.double().mean().item() if difference.numel() else None
    delta, metrics = state.delta(settings, step.step, mean)
    config = ais_config(settings, delta)
    names = ("old_log_probs", "rollout_log_probs", "advantages")
    if config.level == "token":
        # No row matters at token level: short equal rows instead of the longest response's padding.
        width = min(1024, max(1, step.n_tokens))
        padding = -step.n_tokens % width
        pad = lambda x: torch.nn.functional.pad(x, (0, padding)).view(-1, width)
        result = ais_weights(*(pad(step.tensors[name]) for name in names), pad(mask), config, state.alpha)
        weights = result.weights.view(-1)[: step.n_tokens]
    else:
        (_, inside, block), *_ = step.row_blocks(math.inf)
        valid = block["response_mask"].bool()
        result = ais_weights(*(block[name] for name in names), valid, config, state.alpha)
        weights = result.weights[inside]
    state.alpha = result.alpha
    return weights, result.diagnostics | metrics


def edges(size: int, *, equal: int | None = None) -> list[int]:
    """Bin edges over 0..size: about `equal` equal bins, or octaves 1, 2, 4, ..."""
    if equal is not None:
        width = max(1, math.ceil(size / equal))
        return [*range(0, size, width), size] if size else [0]
    out = [0, 1]
    while out[-1] < size:
        out.append(out[-1] * 2)
    return out


def replay(paths: list[Path], overrides: list[str], watch: Iterator[Path] | None = None) -> dict[str, Any]:
    """Replay a dump.

    Args:
        paths: its files.
        overrides: as for :func:`methods`.
        watch: iterates over `paths` too, and may show progress.

    Returns:
        A JSON-serialisable dict: ``run``, ``methods`` (parameters and :func:`run_figures` of each), ``steps``,
        ``by_position``, ``by_length``, ``weight_histogram``.

    Raises:
        DataError: a file that is damaged, of another schema or of another run.
        ConfigError: a wrong override.
    """
    header = read_header(paths[0])
    config = json.loads(header["config"])
    compared = methods(overrides, config.get("is_correction"))
    states, totals = {name: AISState() for name in compared}, {name: Totals() for name in compared}
    plain = ais_config(compared["ais"])
    by_position, by_length = Profile(plain), Profile(plain)
    steps, rejected = [], 0.0
    for path in watch or paths:
        step = read_step(path)
        if step.metadata["run"] != header["run"]:
            raise DataError(
                f"the dump file {path}", f"run {step.metadata['run']}, not {header['run']}", "keep one run to a folder"
            )
        rejected = max(rejected, float(step.metadata.get("rejected_fraction", 0.0)))
        record: dict[str, Any] = {"step": step.step, "mismatch": mismatch_figures(step), "methods": {}}
        for name, settings in compared.items():
            weights, kept, metrics = weigh(step, settings, states[name])
            clip = None if settings.method == "ais" else settings.parameters.get("clip")
            figures = batch_figures(step, weights, kept, clip, totals[name])
            if "ais/clip_fraction" in metrics:  # AIS truncates the ratio, not the weight
                figures["clip_fraction"] = metrics["ais/clip_fraction"]
                totals[name].clipped += round(metrics["ais/clip_fraction"] * metrics["ais/n_tokens"])
            record["methods"][name] = figures | metrics
        add_profiles(step, by_position, by_length)
        steps.append(record)
    return {
        "schema": SCHEMA,
        "run": {
            "name": header["run"],
            "method": header.get("method"),
            "files": len(paths),
            "config": config,
            "rejected_fraction": rejected,
        },
        "methods": {
            name: {"parameters": dict(s.parameters), **run_figures(totals[name], [r["methods"][name] for r in steps])}
            for name, s in compared.items()
        },
        "steps": steps,
        "by_position": by_position.bins(edges(by_position.sums.shape[1], equal=64)),
        "by_length": by_length.bins(edges(by_length.sums.shape[1])),
        "weight_histogram": coarse_histograms({name: t.histogram for name, t in totals.items()}),
    }


def replay_command(dump: str, *, overrides: list[str], json_path: str | None, html_path: str | None) -> int:
    """Replay, print the table, write JSON and HTML; exit code 2 and one sentence if the dump cannot be used."""
    from rich.console import Console
    from rich.progress import track

    folder = Path(dump)
    try:
        paths = [folder] if folder.is_file() else files(folder)
        if not paths:
            fix = "give the folder that is_correction.dump named"
            raise DataError(
                f"the dump {dump}", "no such folder" if not folder.exists() else "no step_*.safetensors in it", fix
            )
        with torch.inference_mode():
            found = replay(paths, overrides, track(paths, "replaying", console=Console(stderr=True), transient=True))
        if json_path is not None:
            Path(json_path).write_text(json.dumps(found, allow_nan=False))
        if html_path is not None:
            from verl_fp8.tools.runs.replay_page import replay_page

            Path(html_path).write_text(replay_page(found))
    except (Fp8Error, OSError) as error:
        print(f"verl-fp8 replay: {error}", file=sys.stderr)
        return 2
    print_table(found)
    return 0


def print_table(found: dict[str, Any]) -> None:
    """Print one row a method."""
    from rich.console import Console
    from rich.table import Table

    steps = found["steps"]
    tokens = sum(s["mismatch"].get("n_tokens", 0) for s in steps)
    title = f"{found['run']['name']}: {len(steps)} batches, {tokens:,.0f} tokens, ran with {found['run']['method']}"
    view = Table(title=title, title_justify="left")
    view.add_column("method")
    for name in COLUMNS:
        view.add_column(name, justify="right")
    for name, row in found["methods"].items():
        view.add_row(name, *table_row(row))
    Console(width=130).print(view)
