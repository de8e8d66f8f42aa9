"""With the package installed and no switch given, verl's own CPU tests do what they do without it."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.wheels import unpacked

# Tests in verl's wheel that start Ray clusters of their own or want models: minutes, for nothing more.
LEFT_OUT = ("single_controller", "agent_loop")


def verls_own_tests(tree: Path, report: Path, **environment) -> dict[str, str]:
    """Test -> ``passed``, ``failed``, ``error`` or ``skipped`` of the CPU tests inside a wheel of verl."""
    files = [
        str(p.relative_to(tree))
        for p in sorted((tree / "tests").rglob("*_on_cpu.py"))
        if not set(LEFT_OUT) & set(p.parts)
    ]
    environment = {**os.environ, "VERL_PLATFORM": "", "PYTHONPATH": str(tree), **environment}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        # verl's configuration, not that of a repository around it.
        "-c",
        os.devnull,
        f"--rootdir={tree}",
        "--continue-on-collection-errors",
        f"--junitxml={report}",
        *files,
    ]
    subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=900, check=False)
    outcomes = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[f"{case.get('classname')}.{case.get('name')}"] = kinds.pop() if kinds else "passed"
    return outcomes


@pytest.mark.slow
def test_verls_own_cpu_tests_are_unaffected(pytestconfig, tmp_path):
    """The same tests with the same outcomes, with our entry point loaded and with plugins switched off."""
    tree = unpacked(pytestconfig.cache, "verl", "0.9.1")
    with_plugin = verls_own_tests(tree, tmp_path / "with.xml")
    without = verls_own_tests(tree, tmp_path / "without.xml", VERL_USE_EXTERNAL_PLUGINS="none")
    # verl 0.9.1's wheel holds 279 of them; far fewer would mean that they were not found.
    assert len(without) > 200 and sum(outcome == "passed" for outcome in without.values()) > 200
    assert with_plugin == without
