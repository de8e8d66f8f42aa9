"""A wheel that cannot be fetched fails its test, unless there is no network at all."""

import subprocess
import sys

import pytest

from tests.wheels import no_network


def pip(*arguments):
    """What pip says on stderr when it downloads nothing."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--isolated",
        "--retries",
        "1",
        *arguments,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode
    return run.stderr


def test_an_index_that_cannot_be_reached_is_no_network(tmp_path):
    """A closed port: pip's own words for it are recognised."""
    assert no_network(pip("--index-url", "http://127.0.0.1:9/simple", "--dest", str(tmp_path), "verl==0.9.0"))


def test_a_version_that_is_not_there_is_a_failure(tmp_path):
    """An index without the version, or with others only: the test that wants it must fail."""
    assert not no_network(pip("--no-index", "--find-links", str(tmp_path), "--dest", str(tmp_path), "verl==0.9.0"))


@pytest.mark.parametrize(
    "said", ["403 Client Error: Forbidden", "from versions: 0.8.0, 0.9.1) after NewConnectionError"]
)
def test_a_server_that_answers_is_a_network(said):
    """A refusal, and a retry that got through."""
    assert not no_network(f"ERROR: HTTP error {said}")
