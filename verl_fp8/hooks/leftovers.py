"""Removes what the processes of a local run leave in /dev/shm and /tmp.

Ray ends its workers and their children with SIGKILL: on Ctrl-C, after an error, and mostly after a good end too. vLLM's
message queues (``psm_*``, a few hundred MiB a run), its sockets and verl's then stay. Python's resource tracker cannot
help, since it is one of those children. They are all children of the driver. So the driver notes what they have open
while they live, lets Ray end them, and removes what is left. On a cluster that was up before the run it sees nothing;
there ``verl-fp8 doctor --ray`` lists leftovers.
"""

import atexit
import contextlib
import functools
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from verl_fp8.sync.segments import SEGMENTS

_MAPPED = re.compile(rf"/dev/shm/(?:{SEGMENTS.pattern})$", re.MULTILINE)
# Between two looks; a process that dies by itself leaves what it had opened before the last one.
LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 20.0


@functools.cache
def watch() -> None:
    """Clear up when this process ends, if it has started Ray; once a process."""
    paths: set[str] = set()
    threading.Thread(target=_look, args=(paths,), name="verl_fp8-leftovers", daemon=True).start()
    atexit.register(_at_exit, paths)


def _look(paths: set[str]) -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        with contextlib.suppress(psutil.Error):  # a process may end while the tree is walked
            paths |= opened(psutil.Process().children(recursive=True))


def _at_exit(paths: set[str]) -> None:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    holding = {process: opened([process]) for process in psutil.Process().children(recursive=True)}
    ray.shutdown()
    psutil.wait_procs([process for process, paths_of in holding.items() if paths_of], timeout=PATIENCE_SECONDS)
    remove(paths.union(*holding.values()))


def opened(processes: Iterable[psutil.Process]) -> set[str]:
    """Shared memory segments that these processes have mapped, and socket files they have bound in the temp folder."""
    found = set()
    for process in processes:
        # Processes end while they are looked at, and some are another user's.
        with contextlib.suppress(OSError):
            found |= set(_MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
        with contextlib.suppress(psutil.Error, OSError):
            found |= {c.laddr for c in process.net_connections(kind="unix") if _ours(c.laddr)}
    return found


def remove(paths: Iterable[str]) -> list[str]:
    """Unlink those of the paths that no process has open any more; returns them."""
    in_use = opened(psutil.process_iter())
    removed = []
    for path in sorted(set(paths) - in_use):
        with contextlib.suppress(OSError):
            os.unlink(path)
            removed.append(path)
    return removed


def _ours(path: str) -> bool:
    # Ray's own sockets lie in its session folder, which it looks after itself.
    if not path or Path(path).parent != Path(tempfile.gettempdir()):
        return False
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.stat(path).st_mode)
    return False
