"""Faults in a real run: a killed vLLM worker ends it with an error instead of hanging it, and nothing is left behind."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e


def ours(marker: str, name: str) -> list[psutil.Process]:
    """Processes of one run by an environment variable of it: Ray's daemons are no children of the driver."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("VERL_FILE_LOGGER_PATH") == marker and name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_killed_vllm_worker_ends_the_run(command, tiny_model, tmp_path):
    """SIGKILL to the vLLM worker in the middle of training: the driver ends with an error within 60 s."""
    metrics, log = tmp_path / "metrics.jsonl", tmp_path / "train.log"
    arguments = command(tiny_model, tmp_path, "+fp8=unified", "+is_correction=ais", "trainer.total_training_steps=400")
    env = {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics), "VLLM_CPU_CI_ENV": "1"}
    segments = set(os.listdir("/dev/shm"))
    with log.open("w") as output:
        run = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
            assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        workers = ours(str(metrics), "VLLM::Worker")
        assert len(workers) == 1
        workers[0].kill()
        code = run.wait(timeout=60)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    assert code != 0
    assert "Error" in log.read_text()
    # Ray's own processes get a moment to follow the driver.
    deadline = time.monotonic() + 30
    while ours(str(metrics), "VLLM::") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not ours(str(metrics), "VLLM::")
    assert not {n for n in set(os.listdir("/dev/shm")) - segments if n.startswith("verl_weights_")}
    assert not list(Path("/tmp").glob("rl-colocate-zmq-*.sock")) or not ours(str(metrics), "ray::")
