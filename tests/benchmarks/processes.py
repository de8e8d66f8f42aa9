"""The parts that start vLLM, trainers and whole runs, on SmolLM2-135M as the quickstart prepares it
(``runs/smollm2``)."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import Result

ROOT = Path(__file__).parents[2]
MODEL = Path(os.environ.get("BENCHMARK_MODEL", ROOT / "runs/smollm2/model"))
# What setup.sh exports for every run.
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(ROOT), "VERL_DISABLE_TRITON_FP8": "1", "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip


class Worker:
    """A worker.py that does one piece of work when asked."""

    def __init__(self, *arguments: str) -> None:
        if not MODEL.exists():
            raise SystemExit(f"{MODEL} is not there: bash recipes/quickstart.sh --steps 1, or set BENCHMARK_MODEL")
        script = str(Path(__file__).with_name("worker.py"))
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments, str(MODEL)], env=ENVIRONMENT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        self._line()

    def _line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"a worker failed:\n{self.log.read()[-3000:]}")
        return line

    def piece(self) -> dict:
        """One piece of work."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def end(self) -> dict:
        """Its last answer."""
        self.process.stdin.close()
        found = json.loads(self._line())
        self.process.wait(60)
        return found


def _in_turns(work: str, repeats: int, kinds: tuple[str, ...] = ("fp8", "bf16")) -> dict[str, dict]:
    """kind -> its pieces (without the first) and last answer; all processes live at once, one works at a time."""
    workers = {kind: Worker(work, kind) for kind in kinds}
    pieces: dict[str, list[dict]] = {kind: [] for kind in workers}
    for turn in range(repeats + 1):
        for kind, worker in workers.items():
            piece = worker.piece()
            if turn:
                pieces[kind].append(piece)
    return {kind: {"pieces": pieces[kind], **worker.end()} for kind, worker in workers.items()}


def _median(found: dict, kind: str) -> float:
    return statistics.median(piece["seconds"] for piece in found[kind]["pieces"])


def rollout() -> list[Result]:
    """Tokens a second of vLLM on CPU, 32 sequences, FP8 against bf16."""
    found = _in_turns("rollout", 5)
    value = _median(found, "bf16") / _median(found, "fp8")
    return [
        Result(
            "FP8 rollout, 32 sequences, tokens a second",
            "vLLM in bf16",
            value,
            target=0.65,
            at_most=False,
            figures=found,
        )
    ]


def trainer() -> list[Result]:
    """Time and memory of a training step on the reference backend, against bf16."""
    found = _in_turns("trainer", 5)
    return [
        Result(
            "trainer step, reference backend: time",
            "bf16",
            _median(found, "fp8") / _median(found, "bf16"),
            target=2.0,
            figures=found,
        ),
        Result(
            "trainer step, reference backend: peak resident memory",
            "bf16",
            found["fp8"]["rss"] / found["bf16"]["rss"],
            target=1.3,
        ),
    ]


def _train(steps: int, *overrides: str, model: Path = MODEL, **environment: str) -> tuple[list[dict], str]:
    """(metrics of every step, the end of the log) of a run of the quickstart's configuration."""
    with tempfile.TemporaryDirectory(prefix="verl_fp8_benchmark_") as folder:
        data, metrics = model.parent / "data", Path(folder) / "metrics.jsonl"
        command = [
            sys.executable, "-m", "verl.trainer.main_ppo",
            "--config-dir", str(ROOT / "recipes"), "--config-name", "quickstart",
            f"hydra.run.dir={folder}/hydra", f"actor_rollout_ref.model.path={model}",
            f"data.train_files={data}/train.parquet", f"data.val_files={data}/val.parquet",
            f"reward.custom_reward_function.path={ROOT}/recipes/reward.py",
            f"trainer.default_local_dir={folder}/checkpoints", f"trainer.total_training_steps={steps}", *overrides,
        ]  # fmt: skip
        env = {
            **ENVIRONMENT,
            "VERL_PLATFORM": "cpu",
            "VERL_FILE_LOGGER_PATH": str(metrics),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "HYDRA_FULL_ERROR": "1",
            **environment,
        }
        with open(f"{folder}/log", "w+") as log:
            try:
                subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=900, check=False)
            except subprocess.TimeoutExpired:
                log.write("no end within 900 s")
            log.seek(0)
            end = log.read()[-6000:]
        rows = [json.loads(line)["data"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return rows, end


def sync() -> list[Result]:
    """Wall time of one weight sync over verl's shared-memory transport, sender and vLLM in one process; three ways in
    turns.

    In a whole run verl's timing_s/update_weights says the same, but three of them an hour are no measurement.
    """
    kinds = ("fp8", "stock", "bf16")
    found = _in_turns("sync", 7, kinds)
    note = "sums of every tensor on both sides included in ours; vLLM's own FP8 kernel on CPU needs AMX, ours stood in"
    return [
        Result(
            "wall time of the sync, SmolLM2",
            "stock verl, quantization=fp8",
            _median(found, "fp8") / _median(found, "stock"),
            target=0.5,
            detail=note,
            figures=found,
        ),
        Result(
            "wall time of the sync, SmolLM2", "stock verl, bf16 rollout", _median(found, "fp8") / _median(found, "bf16")
        ),
    ]


def step() -> list[Result]:
    """A whole step without a switch, the package's entry point loaded or not; the CPU platform is needed by both.

    Runs in turns on the tiny model, whose steps are short: what the package might add weighs most there.
    """
    tiny = MODEL.parents[1] / "tiny/model"
    off = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "verl_fp8.cpu.platform"}
    times: list[list[float]] = [[], []]
    for turn in range(4):
        rows, end = _train(10, model=tiny, **(off if turn % 2 else {}))
        if len(rows) < 10:
            raise SystemExit(f"a run without a switch failed:\n{end}")
        times[turn % 2] += [row["timing_s/step"] for row in rows[2:]]
    value = statistics.median(times[0]) / statistics.median(times[1])
    spread = (statistics.quantiles(times[1], n=4)[2] - statistics.quantiles(times[1], n=4)[0]) / statistics.median(
        times[1]
    )
    detail = f"quartiles of stock's own steps lie {spread:.0%} of the median apart"
    return [
        Result(
            "whole step, no switch",
            "stock verl",
            value,
            target=1 + spread,
            detail=detail,
            figures={"with_s": times[0], "without_s": times[1]},
        )
    ]
