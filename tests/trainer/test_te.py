"""The ``te`` backend on the Python of real TransformerEngine wheels; the checks are in te_checks.py, run by te_host.py."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheels import unpacked

HERE = Path(__file__).parent
VERSIONS = ("2.18.0", "2.19.0", "2.20.2")  # the floor, the middle and what pyproject.toml pins
CHECKS = {
    f.name: ast.get_docstring(f)
    for f in ast.parse((HERE / "te_checks.py").read_text()).body
    if isinstance(f, ast.FunctionDef) and f.name.startswith("check_")
}


@pytest.fixture(scope="module")
def results(pytestconfig):
    """version -> check -> "ok" or a traceback; one process a version."""
    found = {}

    def of(version: str) -> dict[str, str]:
        if version not in found:
            folder = unpacked(pytestconfig.cache, "transformer_engine", version)
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parents[1]))),
                # What must not change a recipe of ours.
                "NVTE_BACKWARD_OVERRIDE": "high_precision",
            }
            command = [sys.executable, "-W", "ignore", str(HERE / "te_host.py"), str(folder)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            found[version] = json.loads(done.stdout.splitlines()[-1])
        return found[version]

    return of


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("version", VERSIONS)
def test_transformer_engine(results, version, check):
    """One check of te_checks.py on one version."""
    assert results(version)[check] == "ok", CHECKS[check]
