"""Coarse per-tensor FP8 rollout with and without corrections, against bf16 and unified FP8: runs, results, table, figure.

python recipes/experiments/run.py run [--only SETTING] [--seed N] [--out DIR]   trains what is not there yet, one run at a time
python recipes/experiments/run.py collect [--out DIR]                           all runs of DIR -> results.json, table in README.md
python recipes/experiments/run.py plot                                          results.json -> results.svg (needs matplotlib)

``run`` wants the environment of recipes/setup.sh (the quickstart installs it); a run takes minutes on two cores.
"""

import argparse
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS, README, FIGURE = HERE / "results.json", HERE / "README.md", HERE / "results.svg"

STEPS, SEEDS = 40, (1, 2, 3)
# A floor on the largest magnitude that a scale is made for: each tensor is quantised as if it held one value of this size.
OUTLIER = 4096
DIGITS = "0123456789"
COARSE = ["+fp8=rollout_per_tensor", f"fp8.recipe.eps={OUTLIER}"]
SETTINGS = {
    "bf16": ["+fp8=bf16", "+is_correction=none"],
    "fp8": [*COARSE, "+is_correction=none"],
    "tis": [*COARSE, "+is_correction=tis"],
    "ais": [*COARSE, "+is_correction=ais"],
    "unified": ["+fp8=unified", "+is_correction=none"],
}
NAMES = {
    "bf16": "bf16 rollout", "fp8": "FP8 rollout, uncorrected", "tis": "FP8 rollout, TIS (clip 2)",
    "ais": "FP8 rollout, AIS", "unified": "unified FP8, 128x128 blocks",
}  # fmt: skip
METRICS = {
    "reward": "critic/rewards/mean",
    "k3": "rollout_corr/k3_kl",
    "mean_abs_logp_diff": "fp8/abs_logp_diff_mean",
    "alpha": "ais/alpha",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
}


def inputs(out: Path, seed: int) -> None:
    """The tiny model with this seed's weights, and prompts ``write D`` for all digits in a random order."""
    import pandas as pd

    prepare = runpy.run_path(str(ROOT / "recipes" / "prepare.py"))
    if not (out / f"model-{seed}" / "config.json").exists():
        prepare["tiny_model"](out / f"model-{seed}", seed=seed)
    rows = prepare["rows"]("digit", 512, seed)
    for i, row in enumerate(rows):
        digit = DIGITS[i % len(DIGITS)]
        row["prompt"][0]["content"], row["reward_model"]["ground_truth"] = f"write {digit}", digit
    pd.DataFrame(rows).to_parquet(out / "data.parquet")


def overrides(setting: str, seed: int) -> list[str]:
    """What the run adds to recipes/quickstart.yaml, paths aside."""
    return [
        "data.train_batch_size=10", "data.max_prompt_length=40", "data.max_response_length=16", f"data.seed={seed}",
        "actor_rollout_ref.rollout.n=6", f"actor_rollout_ref.rollout.seed={seed}",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=30", "actor_rollout_ref.rollout.max_model_len=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=5", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=30",
        "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.calculate_entropy=true",
        f"trainer.total_training_steps={STEPS}", *SETTINGS[setting],
    ]  # fmt: skip


def command(out: Path, setting: str, seed: int) -> list[str]:
    """The whole command line, relative to the repository."""
    run = out / f"{setting}-{seed}"
    return [
        "python", "-m", "verl.trainer.main_ppo", "--config-dir", "recipes", "--config-name", "quickstart",
        f"hydra.run.dir={run}/hydra", f"trainer.default_local_dir={run}/checkpoints", f"trainer.experiment_name={run.name}",
        f"actor_rollout_ref.model.path={out}/model-{seed}", f"data.train_files={out}/data.parquet",
        f"data.val_files={out}/data.parquet", "reward.custom_reward_function.path=recipes/reward.py", *overrides(setting, seed),
    ]  # fmt: skip


def steps_of(out: Path, setting: str, seed: int) -> list[dict]:
    """The metrics of the steps a run has made."""
    file = out / f"{setting}-{seed}" / "metrics.jsonl"
    return [json.loads(line)["data"] for line in file.read_text().splitlines()] if file.exists() else []


def train(out: Path, setting: str, seed: int) -> int:
    """One run in a process of its own, unless it is complete; the exit code."""
    if len(steps_of(out, setting, seed)) == STEPS:
        return 0
    run = ROOT / out / f"{setting}-{seed}"
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").unlink(missing_ok=True)
    inputs(ROOT / out, seed)
    env = {**os.environ, "VERL_FILE_LOGGER_PATH": str(run / "metrics.jsonl")}
    with (run / "train.log").open("w") as log:
        arguments = [sys.executable, *command(out, setting, seed)[1:]]
        return subprocess.run(arguments, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False).returncode


def collect(out: Path) -> dict:
    """Every complete run: its command and, per step, the figures of ``METRICS`` with six digits."""
    runs = []
    for setting in SETTINGS:
        for seed in SEEDS:
            steps = steps_of(out, setting, seed)
            if len(steps) != STEPS:
                print(f"{setting}-{seed}: {len(steps)} of {STEPS} steps, left out")
                continue
            figures = {n: [float(f"{s[m]:.6g}") for s in steps] for n, m in METRICS.items() if m in steps[0]}
            runs.append({"setting": setting, "seed": seed, "command": " ".join(command(out, setting, seed)), **figures})
    return {"steps": STEPS, "outlier": OUTLIER, "runs": runs}


def table(results: dict) -> str:
    """Mean over seeds, and the range of the seeds in brackets; all from results.json."""
    late = results["steps"] // 4
    columns = {
        "reward, all steps": lambda r: statistics.fmean(r["reward"]),
        f"reward, last {late}": lambda r: statistics.fmean(r["reward"][-late:]),
        f"k3, last {late}": lambda r: statistics.median(r["k3"][-late:]),
        f"mean abs log-prob difference, last {late}": lambda r: statistics.median(r["mean_abs_logp_diff"][-late:]),
        f"gradient norm, last {late}": lambda r: statistics.median(r["grad_norm"][-late:]),
        f"alpha, last {late}": lambda r: statistics.median(r["alpha"][-late:]) if "alpha" in r else None,
    }
    lines = ["| setting | seeds | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for setting, name in NAMES.items():
        runs = [r for r in results["runs"] if r["setting"] == setting]
        cells = []
        for of in columns.values():
            values = [v for r in runs if (v := of(r)) is not None]
            shown = f"{statistics.fmean(values):.3g} ({min(values):.3g} to {max(values):.3g})" if values else ""
            cells.append(shown)
        lines.append(f"| {name} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=\n<!-- end of table -->)", re.DOTALL)


def plot(results: dict) -> None:
    """Mean over seeds and their range, a panel a figure."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    shown = {"reward": "reward", "k3": "k3 of rollout against trainer", "grad_norm": "gradient norm", "entropy": "entropy"}
    figure, axes = pyplot.subplots(1, len(shown), figsize=(17, 4), layout="constrained")
    for axis, (key, title) in zip(axes, shown.items(), strict=True):
        for setting, name in NAMES.items():
            curves = [r[key] for r in results["runs"] if r["setting"] == setting and key in r]
            if curves:
                over = list(zip(*curves, strict=True))
                (line,) = axis.plot(range(1, len(over) + 1), [statistics.fmean(v) for v in over], label=name, linewidth=1.3)
                axis.fill_between(range(1, len(over) + 1), [min(v) for v in over], [max(v) for v in over], alpha=0.13, color=line.get_color())
        axis.set(title=title, xlabel="step", yscale="log" if key == "k3" else "linear")
    axes[0].legend(fontsize=7)
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "collect", "plot"))
    parser.add_argument("--only", choices=SETTINGS, help="one setting")
    parser.add_argument("--seed", type=int, choices=SEEDS, help="one seed")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="folder of the runs, relative to the repository")
    arguments = parser.parse_args()
    if arguments.what == "run":
        failed = 0
        for seed in [arguments.seed] if arguments.seed else SEEDS:
            for setting in [arguments.only] if arguments.only else SETTINGS:
                code = train(arguments.out, setting, seed)
                print(f"{setting}-{seed}: {'done' if code == 0 else f'failed with exit code {code}, see train.log'}", flush=True)
                failed += code != 0
        return int(failed > 0)
    if arguments.what == "collect":
        results = collect(arguments.out)
        RESULTS.write_text(json.dumps(results, indent=None, separators=(",", ":")).replace('{"setting"', '\n{"setting"') + "\n")
        README.write_text(_TABLE.sub(lambda _: table(results), README.read_text()))
    else:
        plot(json.loads(RESULTS.read_text()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
