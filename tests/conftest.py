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

import runpy
from pathlib import Path

# Imported here, at shallow stack depth: its pytest plugin would import it in the terminal summary, where the ast of
# CPython 3.11
# module fails with "recursion depth mismatch" after a test of the weight transport.
import hypothesis  # noqa: F401
import pytest

ROOT = Path(__file__).resolve().parents[1]
STARTS_RAY = (
    "tests/runs/",
    "tests/sync/test_sender.py",
    "tests/tools/doctor/test_command.py",
    "tests/hooks/test_leftovers.py",
    "tests/correction/test_stage.py",
)


def _starts_ray(nodeid: str) -> bool:
    return nodeid.startswith(STARTS_RAY)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts Ray comes first: left for the end, it would be all that is still waited for."""
    items.sort(key=lambda item: not _starts_ray(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """With ``-n 2`` a file stays on one worker, and all that starts Ray or fills /dev/shm on one and the same.

    Two training runs at once would share the sockets verl names after the job, and the two cores.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if _starts_ray(nodeid) else nodeid.partition("::")[0]

    return Scheduling(config, log)


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
