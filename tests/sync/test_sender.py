"""The trainer's side of the weight transport on verl's own sender and receiver: a failed rollout ends the sync."""

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

from verl_fp8.errors import DataError, SyncError
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.sync import segments
from verl_fp8.sync.sender import WatchedSender
from verl_fp8.sync.stream import outgoing

MB = 1 << 20


def weights(n=4):
    return [(f"w{i}", torch.full((MB // 2,), float(i), dtype=torch.float32)) for i in range(n)]  # 2 MiB each


@pytest.fixture
def handle():
    return f"ipc:///tmp/verl-fp8-test-{uuid.uuid4().hex}.sock"


def sender(handle, task, timeout=30.0, megabytes=4):
    return WatchedSender(zmq_handle=handle, bucket_size_mb=megabytes, use_shm=True, task=task, timeout=timeout, step=7)


def receive(handle, on_bucket):
    BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True).receive_weights(on_bucket)


def test_a_healthy_sync_is_byte_equal(handle):
    """Through verl's real sender, shared memory and receiver every tensor arrives as it was sent."""
    got = {}

    def keep(bucket, is_last):
        got.update((name, tensor.clone()) for name, tensor in bucket)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        task = pool.submit(receive, handle, keep)
        asyncio.run(sender(handle, task).async_send_weights(iter(weights())))
        task.result(timeout=10)
    assert got.keys() == dict(weights()).keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in weights())


def test_a_failing_receiver_ends_the_sync_with_its_error(handle):
    """The receiver raises at its second bucket: stock verl would wait in recv for ever, ours raises."""
    buckets = []

    def fail(bucket, is_last):
        buckets.append(len(bucket))
        if len(buckets) == 2:
            raise RuntimeError("layer 7 does not fit")

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        task = pool.submit(receive, handle, fail)
        start = time.monotonic()
        with pytest.raises(SyncError, match="the vLLM worker failed"):
            asyncio.run(sender(handle, task).async_send_weights(iter(weights(8))))
    # The timeout given is 30 s: the error came through the task, not through the deadline.
    assert time.monotonic() - start < 10


def test_a_silent_receiver_ends_the_sync_at_the_deadline(handle):
    """A receiver that is gone without an error (killed) is given up after the timeout."""
    never = concurrent.futures.Future()
    start = time.monotonic()
    with pytest.raises(SyncError, match="fp8.sync_timeout"):
        asyncio.run(sender(handle, never, timeout=1.0).async_send_weights(iter(weights())))
    assert 1.0 <= time.monotonic() - start < 10


def left():
    """Names of this package's segments."""
    return {name for name in os.listdir(segments.FOLDER) if name.startswith(segments.PREFIX)}


def test_nothing_is_left_behind(handle):
    """After a failed sync neither the socket file nor the shared memory segment is left."""
    before = left()
    with pytest.raises(SyncError):
        asyncio.run(sender(handle, concurrent.futures.Future(), timeout=0.5).async_send_weights(iter(weights())))
    assert not Path(handle.removeprefix("ipc://")).exists()
    assert not left() - before
    assert threading.active_count() < 50


@pytest.mark.parametrize("transport", ["codes", "bf16"])
@pytest.mark.parametrize("bad", ["model.layers.3.mlp.up_proj.weight", "model.norm.weight"])
def test_a_nan_names_the_layer_and_the_step(handle, bad, transport):
    """A weight that is NaN after step 7, in an FP8 layer or not, ends the sync with its name and the step."""
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(5)] + ["model.norm.weight"]
    values = {name: torch.ones(128, 128) for name in names}
    values[bad][5, 6] = float("nan")
    layers = [name.removesuffix(".weight") for name in names[:5]]
    stream = outgoing(values.items(), Fp8Settings.parse({"weight_sync": transport}), layers)
    arrived = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        task = pool.submit(receive, handle, lambda bucket, is_last: arrived.append(bucket))
        with pytest.raises(DataError) as caught:
            asyncio.run(sender(handle, task).async_send_weights(stream))
        # The receiver waits for its first bucket, as vLLM's worker does until the run ends: let this one end.
        with zmq.Context.instance().socket(zmq.REQ) as socket:
            socket.bind(handle)
            socket.send_pyobj({"bucket_meta": {}, "is_last": True})
            socket.recv()
        task.result(timeout=10)
    assert f"ship {bad}" in str(caught.value) and "after step 7" in str(caught.value) and arrived == [[]]


def test_a_full_shared_memory_is_a_sentence(handle):
    """More than /dev/shm can ever hold: refused by name with the size and the key, before a page is touched."""
    size = os.statvfs(segments.FOLDER)
    megabytes = (size.f_blocks * size.f_frsize >> 20) + 1
    before = left()
    with pytest.raises(SyncError) as caught:
        asyncio.run(sender(handle, None, megabytes=megabytes).async_send_weights(iter(weights())))
    message = str(caught.value)
    assert f"{megabytes} MiB" in message and "/dev/shm" in message and "update_weights_bucket_megabytes" in message
    assert not left() - before and not Path(handle.removeprefix("ipc://")).exists()


FILLED = """
import os
from verl_fp8.errors import SyncError
from verl_fp8.sync.segments import Segment
first = Segment(5 << 20)
try:
    Segment(4 << 20)
except SyncError as error:
    print(error)
assert os.listdir("/dev/shm") == [first.name], os.listdir("/dev/shm")
first.buf[:] = bytes(5 << 20)
first.close(), first.unlink()
last = Segment(8 << 20)
last.buf[:] = bytes(8 << 20)
last.close(), last.unlink()
"""


def test_a_nearly_full_tmpfs_is_a_sentence_and_no_sigbus():
    """On a real tmpfs of 8 MiB with 5 in use, 4 are refused and named; the rest still works."""
    private = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*private, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no mount namespace; the test above covers the refusal")
    script = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'
    run = subprocess.run(
        [*private, "sh", "-c", script, "sh", sys.executable, "-c", FILLED], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "4 MiB of shared memory" in run.stdout and "3 MiB free in /dev/shm" in run.stdout


OWNER = """
import os, signal
from multiprocessing import resource_tracker
from verl_fp8.sync.segments import Segment
segment = Segment(1 << 20)
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # as Ray does, and a container's end
print(segment.name, flush=True)
signal.pause()
"""


def test_only_the_dead_are_swept():
    """A killed process's segment goes; a living one's, a young one and other packages' stay."""
    foreign = segments.FOLDER / f"psm_{uuid.uuid4().hex[:8]}"
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        foreign.write_bytes(b"theirs")
        dead, alive = (owner.stdout.readline().strip() for owner in owners)
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        assert dead not in segments.sweep() and dead in left()
        swept = segments.sweep(settled=0)
        assert dead in swept and alive not in swept
        assert alive in left() and foreign.exists()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
        segments.sweep(settled=0)
        foreign.unlink()
    assert not {dead, alive} & left()
