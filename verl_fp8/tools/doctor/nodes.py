"""The nodes of a Ray cluster: asked for their facts, and compared with this machine."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from verl_fp8.tools.doctor import remote
from verl_fp8.tools.doctor.diagnosis import FAIL, OK, WARN, Finding

# Variables that change what a process does with the switches; of the rest a difference is only worth a warning.
DECISIVE = (
    "VERL_PLATFORM",
    "VERL_USE_EXTERNAL_PLUGINS",
    "VLLM_PLUGINS",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
)
# What Ray gives each of its own processes, and a machine's own.
_OWN = ("RAY_", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "VLLM_HOST_IP", "VLLM_CACHE_ROOT", "CUDA_HOME", "CUDA_PATH")


def ask_nodes(address: str, code: str, segments: str, timeout: float) -> dict[str, dict[str, Any]]:
    """Gather the facts in a Ray worker of every node that is alive; the runtime environment is verl's own.

    Args:
        address: of the cluster, as ``ray.init`` takes it.
        code, segments, timeout: of :func:`verl_fp8.tools.doctor.remote.gather`.

    Returns:
        node -> its facts.

    Raises:
        Exception: Ray's, if there is no such cluster.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        # Ray itself tries for minutes.
        socket.create_connection((host, int(port)), timeout=10).close()
    environment = _runtime_environment(timeout)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
    # By value: this package may be missing on a node, or be another version.
    ray.cloudpickle.register_pickle_by_value(remote)
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(remote.gather)
        answers = {
            f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(code, segments, timeout=timeout)
            for node in ray.nodes()
            if node["Alive"]
        }
        return {name: _answer(answer, 2 * timeout) for name, answer in answers.items()}
    finally:
        ray.cloudpickle.unregister_pickle_by_value(remote)
        ray.shutdown()


def _answer(answer: Any, timeout: float) -> dict[str, Any]:
    import ray

    try:
        return ray.get(answer, timeout=timeout)
    except Exception as error:
        return {"ended": f"no worker could look: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"}


def _runtime_environment(timeout: float) -> dict[str, Any]:
    """What verl gives its workers (trainer/constants_ppo.py), or nothing where verl does not import."""
    module = "verl.trainer.constants_ppo"
    code = f"import json; from {module} import get_ppo_ray_runtime_env as get; print('\\n' + json.dumps(get()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False)
    if run.returncode:
        return {}
    found = json.loads(run.stdout.strip().splitlines()[-1])
    return {"env_vars": found.get("env_vars", {})}


def differences_between_nodes(here: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """What differs between this process and the workers of the nodes: versions, and variables that do not arrive.

    Args:
        here: the facts of this process.
        nodes: node's name -> the facts of a Ray worker there.
    """
    for name, facts in nodes.items():
        ours, theirs = here.get("versions", {}), facts.get("versions", {})
        if theirs and "error" not in theirs and "error" not in ours:
            for package in sorted({*ours, *theirs}):
                if ours.get(package) != theirs.get(package):
                    yield Finding(
                        name,
                        package,
                        FAIL,
                        f"{theirs.get(package, 'none')}, here {ours.get(package, 'none')}",
                        "install the same versions on every node",
                    )
        mine = here.get("process", {}).get("environment", {})
        its = facts.get("process", {}).get("environment")
        if its is None:
            continue
        differing = [v for v in sorted({*mine, *its}) if mine.get(v) != its.get(v)]
        for variable in differing:
            if variable.startswith(_OWN) or (variable not in mine and variable not in DECISIVE):
                continue  # verl sets some of its workers' variables itself
            value = mine.get(variable)
            fix = (
                f"+ray_kwargs.ray_init.runtime_env.env_vars.{variable}={value}"
                if value is not None
                else f"unset {variable} on the node"
            )
            level = FAIL if variable in DECISIVE else WARN
            yield Finding(
                name,
                variable,
                level,
                f"{its.get(variable)!r} in a worker, {value!r} here: an exported variable reaches no "
                "cluster that is already up",
                fix,
            )
        if not [v for v in differing if not v.startswith(_OWN) and v in mine]:
            yield Finding(name, "environment", OK, "as here")
