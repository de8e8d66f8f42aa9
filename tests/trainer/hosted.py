"""Checks that need another version of a dependency than the tests' process has loaded, each of them a test of its own.

A file of checks (``te_checks.py``) is run by a host, a script in a process of its own, which loads that version first.
The test file has one test for each check, by name, and starts the host once a version, with the checks that pytest has
selected: ``pytest -k check_recompute`` runs that one. By hand, where a debugger is wanted, all of them or the named::

    PYTHONPATH=tests/trainer:. VERL_FP8_CHECKS=check_recompute python tests/trainer/te_host.py WHEEL_FOLDER

Hosts import this file as ``hosted``, tests as ``tests.trainer.hosted``: site-packages has a package ``tests`` too.
"""

import ast
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ASKED = "VERL_FP8_CHECKS"
OK = "ok"


# ---------------------------------------------------------------- in the tests' process


def checks_in(*files: Path, prefix: str = "check_") -> dict[str, str]:
    """name -> docstring of the checks in files that are not imported here."""
    bodies = [node for file in files for node in ast.parse(file.read_text()).body]
    found = [node for node in bodies if isinstance(node, ast.FunctionDef) and node.name.startswith(prefix)]
    return {node.name: ast.get_docstring(node) for node in found}


def selected(request: pytest.FixtureRequest, **values: Any) -> list[dict[str, Any]]:
    """The parameters of those tests of this file that pytest is going to run, with these values among them."""
    parameters = [i.callspec.params for i in request.session.items if i.path == request.path and hasattr(i, "callspec")]
    return [p for p in parameters if "check" in p and all(p.get(key) == value for key, value in values.items())]


def environment(names: Sequence[str]) -> dict[str, str]:
    """What a host needs: where to find this file and the package, and which checks to run."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parents[1]))), ASKED: ",".join(names)}


def start(script: Path, *arguments: str, names: Sequence[str], timeout: float, **variables: str) -> dict[str, Any]:
    """Run a host to its end, and return what it printed last: name -> ``ok`` or what went wrong."""
    command = [sys.executable, "-W", "ignore", str(script), *arguments]
    env = environment(names) | variables
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def judge(result: str, meant: str) -> None:
    """Fail with the host's traceback."""
    if result != OK:
        pytest.fail(f"{meant}\n\n{result}", pytrace=False)


# ---------------------------------------------------------------- in the host


def run(*namespaces: Mapping[str, Callable[[], Any]], prefix: str = "check_") -> dict[str, Any]:
    """Call the checks asked for, all without :data:`ASKED`; name -> what it returned, ``ok`` for None, or a
    traceback."""
    asked, results = set(filter(None, os.environ.get(ASKED, "").split(","))), {}
    for name, check in [item for namespace in namespaces for item in namespace.items()]:
        if name.startswith(prefix) and (not asked or name in asked):
            try:
                value = check()
                results[name] = OK if value is None else value
            except BaseException:
                results[name] = traceback.format_exc()
    return results
