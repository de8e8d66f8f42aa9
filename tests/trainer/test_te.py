"""The ``te`` backend on the Python of real TransformerEngine wheels; the checks are in te_checks.py, run by
te_host.py."""

import functools
from pathlib import Path

import pytest

from tests.trainer.hosted import checks_in, judge, selected, start
from tests.wheels import unpacked

HERE = Path(__file__).parent
VERSIONS = ("2.18.0", "2.19.0", "2.20.2")  # the floor, the middle and what pyproject.toml pins
CHECKS = checks_in(HERE / "te_checks.py")


@pytest.fixture(scope="module")
def results(request, pytestconfig):
    """version -> check -> what it said; one process a version."""

    @functools.cache
    def of(version: str) -> dict[str, str]:
        folder = unpacked(pytestconfig.cache, "transformer_engine", version)
        names = [parameters["check"] for parameters in selected(request, version=version)]
        # The variable must not change a recipe of ours.
        override = {"NVTE_BACKWARD_OVERRIDE": "high_precision"}
        return start(HERE / "te_host.py", str(folder), names=names, timeout=300, **override)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("version", VERSIONS)
def test_transformer_engine(results, version, check):
    """One check of te_checks.py on one version."""
    judge(results(version)[check], CHECKS[check])
