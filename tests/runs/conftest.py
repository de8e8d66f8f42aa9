"""Real training runs: verl's own entry point, Ray, vLLM, in a child process under a time limit."""

import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
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
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            "--config-dir",
            str(ROOT / "recipes"),
            "--config-name",
            "quickstart",
            f"hydra.run.dir={out}/hydra",
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={data_dir}/train.parquet",
            f"data.val_files={data_dir}/val.parquet",
            f"reward.custom_reward_function.path={ROOT}/recipes/reward.py",
            f"trainer.default_local_dir={out}/checkpoints",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            *overrides,
        ]

    return make


class Running:
    """A run that is going on, to do something to it."""

    def __init__(self, command: list[str], out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.log_file, self.metrics_file = out / "train.log", out / "metrics.jsonl"
        self.metrics_file.unlink(missing_ok=True)
        self.environment = {
            **os.environ, "VERL_FILE_LOGGER_PATH": str(self.metrics_file), "VLLM_CPU_CI_ENV": "1",
            "HYDRA_FULL_ERROR": "1", "RAY_DEDUP_LOGS": "0",
        }  # fmt: skip
        self.environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
        with self.log_file.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )

    @property
    def log(self) -> str:
        """What it has written."""
        return self.log_file.read_text(errors="replace")

    @property
    def steps(self) -> list[dict]:
        """The metrics of the steps it has finished."""
        lines = self.metrics_file.read_text().splitlines(keepends=True) if self.metrics_file.exists() else []
        return [json.loads(line)["data"] for line in lines if line.endswith("\n")]

    def wait_for_steps(self, count: int, timeout: float = 420) -> None:
        """Return after so many steps."""
        deadline = time.monotonic() + timeout
        while len(self.steps) < count:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.2)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Its processes by an environment variable of it: not all of Ray's are children of the driver."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("VERL_FILE_LOGGER_PATH") == str(self.metrics_file)
                if mine and name in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_for_processes(self, timeout: float, name: str = "") -> list[psutil.Process]:
        """Those that are left after that time."""
        deadline = time.monotonic() + timeout
        while (left := self.processes(name)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def end(self) -> None:
        """Kill what is left of it."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def running(command):
    """with running(model, out, *overrides) as run: a :class:`Running`, of which nothing is left afterwards."""

    @contextlib.contextmanager
    def start(model: str, out: Path, *overrides: str):
        run = Running(command(model, out, *overrides), out)
        try:
            yield run
        finally:
            run.end()

    return start


@pytest.fixture(scope="session")
def train(running):
    """train(model, out, *overrides, timeout=420) -> Run. Nothing of it outlives the limit."""

    def start(model: str, out: Path, *overrides: str, timeout: float = 420) -> Run:
        with running(model, out, *overrides) as run:
            try:
                code = run.process.wait(timeout)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the run did not end within {timeout} s; its log ends:\n{run.log[-3000:]}")
        return Run(code, run.log, run.steps)

    return start
