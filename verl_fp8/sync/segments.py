"""Shared memory of the weight sync: really there before it is written to, and swept when its owner has died.

A tmpfs promises pages it may not have: the first write to one it cannot provide kills the process with SIGBUS. And a
killed process leaves its segments behind, for good if the resource tracker beside it was killed too.
"""

import contextlib
import errno
import fcntl
import os
import re
import time
import uuid
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from verl_fp8.errors import SyncError

FOLDER = Path("/dev/shm")
PREFIX = "verl_fp8_weights_"
BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"

# A segment is unlocked for the moment between its creation and its lock.
_SETTLED_SECONDS = 60.0


class Segment(SharedMemory):
    """A new segment with all of its pages allocated, locked for as long as this process lives.

    Args:
        size: bytes.

    Raises:
        SyncError: /dev/shm has not that much room; nothing is left behind.
    """

    def __init__(self, size: int) -> None:
        self._lock = -1
        super().__init__(name=f"{PREFIX}{uuid.uuid4().hex}", create=True, size=size)
        try:
            self._lock = os.open(FOLDER / self.name, os.O_RDWR)
            # The kernel drops it with the process, in whatever PID namespace that lives.
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.posix_fallocate(self._lock, 0, size)
        except OSError as error:
            self.close()
            self.unlink()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            free = os.statvfs(FOLDER)
            raise SyncError(
                f"{size >> 20} MiB of shared memory for a weight sync ({BUCKET}, one for each rank of a node)",
                f"{free.f_bavail * free.f_frsize >> 20} MiB free in {FOLDER} ({error.strerror})",
                f"lower {BUCKET}, or give {FOLDER} more room (docker run --shm-size); "
                "verl-fp8 doctor lists leftovers in it",
            ) from error

    def unlink(self) -> None:
        """Remove the segment and its lock."""
        super().unlink()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(settled: float = _SETTLED_SECONDS) -> list[str]:
    """Remove this user's segments whose owner is dead, and return their names. Others' segments are not looked at.

    Args:
        settled: seconds a segment must have existed.
    """
    removed = []
    for path in FOLDER.glob(f"{PREFIX}*"):
        # Another sweep, its owner or another user may be faster or in the way.
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < settled:
                continue
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(lock)
    return removed


# Python's multiprocessing.shared_memory, verl's and this package's weight sync, vLLM's tensor parallelism on CPU.
SEGMENTS = re.compile(r"psm_[0-9a-f]+|verl_(?:fp8_)?weights_[0-9a-f]+|vllm_dist_[\w:\[\]-]+")
