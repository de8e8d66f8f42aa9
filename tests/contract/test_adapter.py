"""The trainer's side of the weight transport on verl's own sender and receiver: a failed rollout ends the sync."""

import asyncio
import concurrent.futures
import threading
import time
import uuid

import pytest
import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

from verl_fp8.adapter import WatchedSender
from verl_fp8.errors import SyncError

MB = 1 << 20


def weights(n=4):
    return [(f"w{i}", torch.full((MB // 2,), float(i), dtype=torch.float32)) for i in range(n)]  # 2 MiB each


@pytest.fixture
def handle():
    return f"ipc:///tmp/verl-fp8-test-{uuid.uuid4().hex}.sock"


def sender(handle, task, timeout=30.0):
    return WatchedSender(zmq_handle=handle, bucket_size_mb=4, use_shm=True, task=task, timeout=timeout)


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


def test_nothing_is_left_behind(handle):
    """After a failed sync neither the socket file nor the shared memory segment is left."""
    import os
    from pathlib import Path

    before = set(os.listdir("/dev/shm"))
    with pytest.raises(SyncError):
        asyncio.run(sender(handle, concurrent.futures.Future(), timeout=0.5).async_send_weights(iter(weights())))
    assert not Path(handle.removeprefix("ipc://")).exists()
    assert {n for n in set(os.listdir("/dev/shm")) - before if n.startswith("verl_weights_")} == set()
    assert threading.active_count() < 50
