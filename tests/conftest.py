"""What every test needs before anything of verl is imported: the CPU platform, no network, and the tiny models."""

import os

# As recipes/setup.sh sets them.
for _name, _value in {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VERL_LOGGING_LEVEL": "ERROR",
}.items():
    os.environ.setdefault(_name, _value)

import runpy  # noqa: E402
from pathlib import Path  # noqa: E402

# Imported here, at shallow stack depth: its pytest plugin would import it in the terminal summary, where CPython 3.11's ast
# module fails with "recursion depth mismatch" after a test of the weight transport.
import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """make_model(arch="qwen3", tied=False) -> folder of a tiny model, made once a session by recipes/prepare.py."""
    prepare, made = runpy.run_path(str(ROOT / "recipes" / "prepare.py")), {}

    def make(arch: str = "qwen3", tied: bool = False) -> str:
        if (arch, tied) not in made:
            made[arch, tied] = tmp_path_factory.mktemp(f"{arch}-tied" if tied else arch)
            prepare["tiny_model"](made[arch, tied], tied=tied, arch=arch)
        return str(made[arch, tied])

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model) -> str:
    """Folder of the quickstart's tiny model."""
    return make_model()
