"""What killed processes leave in /dev/shm and the temporary folder: noted while they live, removed afterwards."""

import os
import signal
import subprocess
import sys
import tempfile
import uuid

import psutil
import pytest

from verl_fp8.hooks.leftovers import opened, remove

# A vLLM process as Ray leaves it: a message queue, a socket, and a resource tracker that is killed with it.
PROCESS = """
import os, signal, sys, zmq
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind("ipc://" + sys.argv[1])
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
print("/dev/shm/" + segment.name, flush=True)
signal.pause()
"""


@pytest.fixture
def process():
    """(the process, its segment, its socket)."""
    socket = os.path.join(tempfile.gettempdir(), str(uuid.uuid4()))
    child = subprocess.Popen([sys.executable, "-c", PROCESS, socket], stdout=subprocess.PIPE, text=True)
    yield child, child.stdout.readline().strip(), socket
    child.kill()
    child.wait()


def test_what_a_killed_process_leaves_is_removed(process):
    """Segment and socket are noted while the process lives, not touched then, and gone after its SIGKILL."""
    child, segment, socket = process
    paths = opened([psutil.Process(child.pid)])
    assert paths == {segment, socket}
    assert remove(paths) == [] and os.path.exists(segment) and os.path.exists(socket)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert set(remove(paths)) == {segment, socket}
    assert not os.path.exists(segment) and not os.path.exists(socket)


def test_other_files_are_not_ours(tmp_path):
    """A process's other files and mappings, Ray's session sockets among them, are never noted."""
    code = f"""
import mmap, os, signal, socket
os.makedirs({str(tmp_path)!r} + "/s"); s = socket.socket(socket.AF_UNIX); s.bind({str(tmp_path)!r} + "/s/raylet")
f = open("/dev/shm/nothing_of_ours_{os.getpid()}", "w+b"); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)
print(flush=True); signal.pause()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert opened([psutil.Process(child.pid)]) == set()
    finally:
        child.kill()
        child.wait()
        os.unlink(f"/dev/shm/nothing_of_ours_{os.getpid()}")


DRIVER = """
import os, signal, sys, time
import ray
from verl_fp8.hooks import leftovers
leftovers.LOOK_SECONDS = 0.2
leftovers.watch()
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)

@ray.remote
class Server:
    def open(self):
        from multiprocessing import shared_memory
        import zmq
        self.segment = shared_memory.SharedMemory(create=True, size=4096)
        self.socket = zmq.Context().socket(zmq.ROUTER)
        self.socket.bind("ipc:///tmp/" + os.urandom(8).hex())
        path = self.socket.last_endpoint.decode().rstrip("\\0")[len("ipc://"):]
        return "/dev/shm/" + self.segment.name, path, os.getpid()

    def serve(self):
        time.sleep(60)

server = Server.remote()
*paths, pid = ray.get(server.open.remote())
print(*paths, flush=True)
assert all(map(os.path.exists, paths))
if sys.argv[1] == "killed":
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
elif sys.argv[1] == "ctrl-c":
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
if sys.argv[1] != "end":
    ray.get(server.serve.remote())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error"), [("end", None), ("ctrl-c", "KeyboardInterrupt"), ("killed", "ActorDiedError")]
)
def test_nothing_of_a_local_ray_is_left(how, error):
    """A real Ray and an actor with a segment and a socket: gone after a good end, Ctrl-C, or the actor's own death."""
    run = subprocess.run([sys.executable, "-c", DRIVER, how], capture_output=True, text=True, timeout=120)
    paths = run.stdout.splitlines()[0].split()
    assert len(paths) == 2 and not [path for path in paths if os.path.exists(path)]
    assert (run.returncode == 0) == (error is None) and (error is None or error in run.stderr)
