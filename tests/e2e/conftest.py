"""Real training runs: verl's own entry point, Ray, vLLM, in a child process under a time limit."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Run:
    """One finished run of ``python -m verl.trainer.main_ppo``."""

    code: int
    log: str
    steps: list[dict] = field(default_factory=list)

    def metric(self, name: str) -> list[float]:
        """The metric's value at every step that has it."""
        return [s[name] for s in self.steps if name in s]

    def found(self, pattern: str) -> list[str]:
        """All matches of a regular expression in the log."""
        return re.findall(pattern, self.log)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    """Folder with the quickstart's data for the tiny model."""
    folder = tmp_path_factory.mktemp("data")
    runpy.run_path(str(ROOT / "recipes" / "prepare.py"))["write_data"](folder, "digit", 256)
    return folder


@pytest.fixture(scope="session")
def command(data_dir):
    """command(model, out, *overrides) -> the argument list of a run on the quickstart's configuration."""

    def make(model: str, out: Path, *overrides: str) -> list[str]:
        return [
            sys.executable, "-m", "verl.trainer.main_ppo",
            "--config-dir", str(ROOT / "recipes"), "--config-name", "quickstart",
            f"hydra.run.dir={out}/hydra", f"actor_rollout_ref.model.path={model}",
            f"data.train_files={data_dir}/train.parquet", f"data.val_files={data_dir}/val.parquet",
            f"reward.custom_reward_function.path={ROOT}/recipes/reward.py",
            f"trainer.default_local_dir={out}/checkpoints", "actor_rollout_ref.actor.optim.lr=1e-3",
            *overrides,
        ]

    return make


@pytest.fixture(scope="session")
def train(command):
    """train(model, out, *overrides, timeout=420) -> Run. The process group is ended if it outlives the limit."""

    def start(model: str, out: Path, *overrides: str, timeout: float = 420) -> Run:
        out.mkdir(parents=True, exist_ok=True)
        log, metrics = out / "train.log", out / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        env = {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics), "VLLM_CPU_CI_ENV": "1", "HYDRA_FULL_ERROR": "1", "RAY_DEDUP_LOGS": "0"}
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
        with log.open("w") as output:
            process = subprocess.Popen(
                command(model, out, *overrides), stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                pytest.fail(f"the run did not end within {timeout} s; its log ends:\n{log.read_text()[-3000:]}")
        steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return Run(code, log.read_text(errors="replace"), steps)

    return start
