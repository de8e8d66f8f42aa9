"""Faults in a real run: it ends with an error instead of hanging, and nothing of it is left behind."""

import os
import signal
import time

import pytest

from verl_fp8.hooks.leftovers import opened

pytestmark = pytest.mark.e2e

SWITCHES = ("+fp8=unified", "+is_correction=ais", "trainer.total_training_steps=400")


def left_of(paths: set[str], timeout: float = 10) -> list[str]:
    """Those of the run's segments and sockets that are still there after that time."""
    deadline = time.monotonic() + timeout
    while (left := sorted(filter(os.path.exists, paths))) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def test_a_killed_vllm_worker_ends_the_run(running, tiny_model, tmp_path):
    """SIGKILL to the vLLM worker in the middle of training: an error within 60 s, nothing left behind."""
    with running(tiny_model, tmp_path, *SWITCHES) as run:
        run.wait_for_steps(2)
        paths = opened(run.processes())
        assert any("/psm_" in path for path in paths)
        (worker,) = run.processes("VLLM::Worker")
        worker.kill()
        code = run.process.wait(timeout=60)
        assert code != 0
        assert "Error" in run.log
        # Ray's own processes get a moment to follow the driver.
        assert not run.wait_for_processes(30)
        assert not left_of(paths)


def test_ctrl_c_in_an_asynchronous_run(running, tiny_model, tmp_path):
    """trainer_mode=colocate_async trains with both switches, every sync verified; Ctrl-C ends all of it within 60 s."""
    mode = ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.sampler.custom_sampler.name=EagerReplayBufferAsync")
    with running(tiny_model, tmp_path, *SWITCHES, *mode) as run:
        run.wait_for_steps(3)
        steps = run.steps
        assert {s["fp8/sync_bytes_per_weight"] for s in steps} == {1 + 4 / 128**2}
        assert all(0 < s["ais/alpha"] <= 1 for s in steps) and 1.0 in [s["ais/active"] for s in steps]
        assert run.log.count("all bytes equal to the trainer's") == 1
        paths = opened(run.processes())
        # As a terminal does: to the driver and whatever shares its group.
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(timeout=60) != 0
        assert not run.wait_for_processes(30)
        assert not left_of(paths)
