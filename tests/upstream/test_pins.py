"""What stands once in the code: TransformerEngine's pin, and the question whether verl runs on its CPU platform."""

import re
import subprocess
import sys

import pytest

from verl_fp8.switches.hardware import TRANSFORMER_ENGINE
from verl_fp8.upstream import pins
from verl_fp8.upstream.platform import cpu_platform


def test_the_pin_is_pyprojects_and_inside_the_range(root):
    """A message tells to install what the extra installs, and what the rules then take."""
    assert f'"transformer-engine[pytorch]=={pins.TRANSFORMER_ENGINE}"' in (root / "pyproject.toml").read_text()
    assert TRANSFORMER_ENGINE.contains(pins.TRANSFORMER_ENGINE)


def test_no_code_names_the_pin_again(root):
    """A second copy would stay behind when the pin moves."""
    files = [p for p in (root / "verl_fp8").rglob("*.py") if p.name != "pins.py"]
    assert not [p for p in files if re.search(r"==2\.20|\"2\.20", p.read_text())]


@pytest.mark.parametrize(
    ("value", "wanted"), [("cpu", True), (" CPU ", True), ("", False), ("cuda", False), (None, False)]
)
def test_the_cpu_platform_is_verls_own_variable(monkeypatch, value, wanted):
    """As verl reads it; asked of this process, or of another one's environment."""
    environment = {} if value is None else {"VERL_PLATFORM": value}
    assert cpu_platform(environment) is wanted
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    for name, setting in environment.items():
        monkeypatch.setenv(name, setting)
    assert cpu_platform() is wanted


def test_both_are_free_to_import():
    """The doctor needs them where every other package may be broken, verl's plugin in every process."""
    code = (
        "import sys; before = set(sys.modules); import verl_fp8.upstream.pins, verl_fp8.upstream.platform; "
        "print(*{m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["verl_fp8"]
