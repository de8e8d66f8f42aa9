"""The parts that start vLLM and trainers, on SmolLM2-135M as the quickstart prepares it (``runs/smollm2``)."""

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
    **os.environ, "PYTHONPATH": str(ROOT), "VERL_DISABLE_TRITON_FP8": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
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
    return [Result("FP8 rollout, 32 sequences, tokens a second", "vLLM in bf16", value, target=0.65, at_most=False, figures=found)]


def trainer() -> list[Result]:
    """Time and memory of a training step on the reference backend, against bf16."""
    found = _in_turns("trainer", 5)
    return [
        Result("trainer step, reference backend: time", "bf16", _median(found, "fp8") / _median(found, "bf16"), target=2.0, figures=found),
        Result("trainer step, reference backend: peak resident memory", "bf16", found["fp8"]["rss"] / found["bf16"]["rss"], target=1.3),
    ]


def sync() -> list[Result]:
    """Wall time of one weight sync over verl's shared-memory transport, sender and vLLM in one process; three ways in turns.

    A whole run has it as timing_s/update_weights, once a step.
    """
    kinds = ("fp8", "stock", "bf16")
    found = _in_turns("sync", 7, kinds)
    note = "sums of every tensor on both sides included in ours; vLLM's own FP8 kernel on CPU needs AMX, ours stood in"
    return [
        Result("wall time of the sync, SmolLM2", "stock verl, quantization=fp8", _median(found, "fp8") / _median(found, "stock"), target=0.5, detail=note, figures=found),
        Result("wall time of the sync, SmolLM2", "stock verl, bf16 rollout", _median(found, "fp8") / _median(found, "bf16")),
    ]
