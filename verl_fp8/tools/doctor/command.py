"""``verl-fp8 doctor [--ray ADDRESS] [--json]``: what a machine, or every node of a Ray cluster, lacks for an FP8 run.

The facts are gathered by :mod:`verl_fp8.tools.doctor.facts` in a process of its own: here, and with an address in a Ray worker of
every node, as a run's own workers are started; :mod:`verl_fp8.tools.doctor.diagnosis` judges them. Needs nothing but the standard
library: any one broken package, or all of them missing, is a finding like any other.
"""

import importlib.util
import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_fp8.sync.segments import SEGMENTS
from verl_fp8.tools.doctor.diagnosis import FAIL, OK, WARN, Finding, compare, judge

# Importing everything takes about 30 s on an idle machine, minutes on a busy one.
TIMEOUT = 600


def source() -> str:
    """The source of :mod:`verl_fp8.tools.doctor.facts`, which is sent to the nodes."""
    return Path(__file__).with_name("facts.py").read_text()


def gather(code: str, segments: str = SEGMENTS.pattern, timeout: float = TIMEOUT) -> dict[str, Any]:
    """Run the facts' source in a process of its own. Sent to Ray by value, hence its own imports.

    Returns:
        section -> what was found, or ``{"error": one line}``.
    """
    import json
    import subprocess
    import sys
    import tempfile

    sections, ended = {}, None
    command = [sys.executable, *(["-S"] if sys.flags.no_site else []), "-c", code, segments]
    # A file for stderr: a pipe would fill up, or stay open in a process left behind.
    with tempfile.TemporaryFile("w+") as errors:
        try:
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=timeout)
            output = run.stdout
            if run.returncode:
                errors.seek(0)
                last = ([line.strip() for line in errors.read().splitlines() if line.strip()] or ["no message"])[-1]
                ended = f"the process ended with code {run.returncode}: {last[:300]}"
        except subprocess.TimeoutExpired as error:
            output = error.stdout or ""
            output = output.decode() if isinstance(output, bytes) else output
            ended = f"no answer within {timeout:g} s"
    for line in output.splitlines():
        if line.startswith("verl_fp8-facts "):
            answer = json.loads(line.partition(" ")[2])
            sections[answer["section"]] = {"error": answer["error"]} if "error" in answer else answer["found"]
    if ended is not None:
        sections["ended"] = ended
    return sections


def cluster(address: str) -> dict[str, dict[str, Any]]:
    """Node -> its facts, gathered in a Ray worker of every node that is alive; the runtime environment is verl's own.

    Raises:
        Exception: Ray's, if there is no such cluster.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        # Ray itself tries for minutes.
        socket.create_connection((host, int(port)), timeout=10).close()
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=_runtime_environment())
    try:
        # By value: this package may be missing on a node, or be another version.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        remote = ray.remote(num_cpus=0, max_retries=0)(gather)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        tasks = {
            f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": remote.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(source(), SEGMENTS.pattern, TIMEOUT)
            for node in nodes
        }
        found = {}
        for name, task in tasks.items():
            try:
                found[name] = ray.get(task, timeout=2 * TIMEOUT)
            except Exception as error:
                found[name] = {
                    "ended": f"no worker could look: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
                }
        return found
    finally:
        ray.shutdown()


def _runtime_environment() -> dict[str, Any]:
    """What verl gives its workers (trainer/constants_ppo.py), or nothing where verl does not import."""
    module = "verl.trainer.constants_ppo"
    code = f"import json; from {module} import get_ppo_ray_runtime_env as get; print('\\n' + json.dumps(get()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if run.returncode:
        return {}
    found = json.loads(run.stdout.strip().splitlines()[-1])
    return {"env_vars": found.get("env_vars", {})}


def examine(address: str | None) -> tuple[list[Finding], dict[str, dict[str, Any]]]:
    """All findings, and the facts by place (``here`` and the nodes)."""
    here = gather(source())
    findings = list(judge(here))
    places = {"here": here}
    if address is not None:
        if importlib.util.find_spec("ray") is None:
            findings.append(
                Finding(
                    "here", "Ray", FAIL, f"not installed, so {address} cannot be asked", "pip install 'ray[default]'"
                )
            )
        else:
            try:
                nodes = cluster(address)
            except Exception as error:
                message = (str(error).strip().splitlines() or ["no message"])[0]
                findings.append(
                    Finding(
                        "here",
                        "Ray",
                        FAIL,
                        f"{address}: {type(error).__name__}: {message}",
                        "ray start --head, or correct the address",
                    )
                )
                nodes = {}
            for name, facts in nodes.items():
                findings += judge(facts, name)
            findings += compare(here, nodes)
            places |= nodes
    return findings, places


def doctor_command(address: str | None, *, as_json: bool = False) -> int:
    """Print findings; exit 0 if none of them is a failure, else 1."""
    findings, places = examine(address)
    failed = [f for f in findings if f.level == FAIL]
    symbols = places["here"].get("symbols")
    symbols = symbols if isinstance(symbols, list) else []
    if as_json:
        rows = [{"path": path, "used_by": users, "problem": problem} for path, users, problem in symbols]
        print(
            json.dumps(
                {"ok": not failed, "findings": [asdict(f) for f in findings], "symbols": rows, "facts": places},
                indent=1,
            )
        )
        return int(bool(failed))
    rows = [(path, ", ".join(users), problem or "yes") for path, users, problem in symbols]
    if rows:
        _print("Upstream symbols", ("symbol", "for", "as relied on"), rows)
    _print(
        "Findings", ("", "where", "what", "found", "do"), [(f.level, f.where, f.what, f.found, f.fix) for f in findings]
    )
    warned = sum(f.level == WARN for f in findings)
    print(f"{len(failed)} failed, {warned} warnings, {len(findings)} looked at.")
    return int(bool(failed))


def _print(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if importlib.util.find_spec("rich") is None:
        print(title)
        for row in rows:
            print("  " + " | ".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {OK: "green", WARN: "yellow", FAIL: "bold red"}
    view = Table(title=title, title_justify="left")
    for column in columns:
        view.add_column(column, overflow="fold")
    for row in rows:
        view.add_row(*(Text(cell, style=colours.get(cell, "")) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=180)).print(view)
