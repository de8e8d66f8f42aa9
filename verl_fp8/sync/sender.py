"""The trainer's side of the weight transport: verl's server adapter with a sync that ends when the rollout has failed.

Stock verl waits in ``socket.recv()`` for the acknowledgement of a vLLM worker that may have raised or died; the run
then hangs for ever (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py).
"""

import time
from typing import Any

import torch
import wrapt
import zmq
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from verl_fp8.errors import DataError, SyncError
from verl_fp8.sync import segments
from verl_fp8.upstream.contract import require

_POLL_MS = 100


class WatchedSocket(wrapt.ObjectProxy):
    """A ZMQ socket whose ``recv`` and ``send_pyobj`` give up when the peer's task has failed, or after a time without
    answer.

    Sending blocks too: a REQ socket waits for a peer to connect.
    """

    def __init__(self, socket: zmq.Socket, task: Any, timeout: float):
        super().__init__(socket)
        self._self_task = task
        self._self_timeout = timeout

    def recv(self, *args, **kwargs):
        self._wait(zmq.POLLIN)
        return self.__wrapped__.recv(*args, **kwargs)

    def send_pyobj(self, *args, **kwargs):
        self._wait(zmq.POLLOUT)
        return self.__wrapped__.send_pyobj(*args, **kwargs)

    def _wait(self, event: int) -> None:
        deadline = time.monotonic() + self._self_timeout
        while not self.__wrapped__.poll(_POLL_MS, event):
            if self._self_task is not None and self._self_task.done():
                error = self._self_task.exception()
                if error is not None:
                    raise SyncError(
                        "a weight sync to vLLM",
                        f"the vLLM worker failed: {error}",
                        "see its error above; the run ends here",
                    ) from error
            if time.monotonic() > deadline:
                raise SyncError(
                    "a weight sync to vLLM",
                    f"no answer from the vLLM worker for {self._self_timeout:g} s",
                    "look for its error above, or raise fp8.sync_timeout if its weights are slow to load",
                )


class WatchedSender(BucketedWeightSender):
    """verl's sender on a :class:`WatchedSocket`.

    Args:
        task: future of the receiving call, or None on ranks that did not start it.
        timeout: seconds to wait for one acknowledgement.
        step: the training step whose update is sent, for the errors; 0 before the first.
    """

    def __init__(self, *args, task: Any, timeout: float, step: int | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self._task, self._timeout, self._step = task, timeout, step

    async def async_send_weights(self, weights):
        """verl's; an error of the weights themselves gets the step they are of.

        Raises:
            DataError: a weight is not finite.
            SyncError: the receiver failed, or /dev/shm is full.
        """
        try:
            await super().async_send_weights(weights)
        except DataError as error:
            raise DataError(f"{error.asked}, after step {self._step}", error.found, error.fix) from error

    def _init_socket(self):
        super()._init_socket()
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket = WatchedSocket(self.socket, self._task, self._timeout)

    def _init_buffer(self):
        if not self.use_shm:
            return super()._init_buffer()
        segments.sweep()
        # verl keeps the segment in a local variable until the receiver has answered: if it never does, the segment
        # stays in /dev/shm for good. Here it belongs to the sender, and to its cleanup, from the start.
        self.shm = segments.Segment(self.bucket_size)
        self.buffer = torch.frombuffer(self.shm.buf, dtype=torch.uint8)
        self.socket.send_pyobj({"name": self.shm.name, "size": self.bucket_size})
        self.socket.recv()


class Fp8ServerAdapter(ServerAdapter):
    """verl's vLLM server adapter; overrides only the full-tensor weight update."""

    def __init__(self, *args, **kwargs):
        require("sync.sender")
        super().__init__(*args, **kwargs)

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors", **kwargs):
        """Send one sync (same steps as verl's): start the receivers, stream the buckets, wait, drop stale KV caches.

        Raises:
            SyncError: a vLLM worker failed or did not answer within ``fp8.sync_timeout``, or /dev/shm is full.
            DataError: a weight is not finite; names the tensor and the step whose update the sync follows.
        """
        if wire_format != "named_tensors":
            return await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **kwargs)
        reference = await self._execute_method(
            "update_weights_from_ipc", non_block=True, kwargs={**kwargs, "use_shm": self.use_shm}
        )
        fp8 = getattr(self.config, "fp8", None)
        sender = WatchedSender(
            zmq_handle=self.zmq_handle,
            bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
            task=None if reference is None else reference.future(),
            timeout=float(fp8["sync_timeout"]) if fp8 else 60.0,
            step=global_steps,
        )
        await sender.async_send_weights(weights)
        if reference is not None:
            await reference
        if self._has_server:
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)
