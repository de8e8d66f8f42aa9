"""Quantising before the gathering, on real FSDP2 shards over gloo, against stock verl's gathering and the quantiser
after it."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.hosted import checks_in, environment, selected

SCRIPT = Path(__file__).with_name("gather_checks.py")
STREAMS = checks_in(SCRIPT, prefix="stream_")
PLACEMENTS = ("by rows", "as verl does", "on a mesh with replicas")

pytestmark = pytest.mark.slow  # two ranks start


@pytest.fixture(scope="module")
def found(request):
    """What two ranks found, of the checks that are selected: check and, where it has one, placement or size."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **environment([f"{p['check']} {p.get('of', '')}".strip() for p in selected(request)]),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs[0][1][-2000:] + outputs[1][1][-2000:]
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.mark.parametrize("check", STREAMS)
@pytest.mark.parametrize("of", PLACEMENTS)
def test_the_stream_is_that_of_gather_then_quantise(found, check, of):
    """Every tensor and the manifest, for even and uneven shards along either dimension, whole and cut blocks, biases,
    fused experts, a tied head; a recipe and a transport for each check."""
    assert found[f"{check} {of}"] == [], STREAMS[check]


@pytest.mark.parametrize("check", ["bytes_gathered"])
@pytest.mark.parametrize("of", [128, 64])
def test_a_quarter_of_the_bytes_is_gathered(found, check, of):
    """Against stock verl's fp32 masters: a byte of code a weight and four bytes of maximum a block (target 0.26)."""
    counted = found[f"{check} {of}"]
    assert counted["stock"] == 4 * counted["weights"]
    assert counted["ours"] <= 0.26 * counted["stock"]


@pytest.mark.parametrize("check", ["nan_on_one_rank"])
def test_a_nan_on_one_rank_ends_both(found, check):
    """Both ranks raise, naming the tensor; otherwise the other would wait in the next collective."""
    assert len(found[check]) == 2
    assert all("ship 1.weight as FP8 codes" in message and "not finite" in message for message in found[check])
