"""AIS with its options in a real training run with one scale a tensor in the rollout, its dump, and its replay."""

import json
import subprocess

import pytest

from verl_fp8.__main__ import main
from verl_fp8.correction.dump import files

pytestmark = pytest.mark.e2e


def test_ais_by_mini_batch_with_a_measured_floor(root, tmp_path, capsys):
    """One scale a tensor in every sync; two optimizer steps a batch, each with its own alpha; delta from the first two
    steps; a dump that replays to the same."""
    out, dump = tmp_path / "run", tmp_path / "dump"
    arguments = [
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "is_correction.scope=mini_batch",
        "is_correction.delta=auto",
        "is_correction.delta_steps=2",
        f"is_correction.dump={dump}",
    ]
    command = [
        "bash",
        str(root / "recipes" / "quickstart.sh"),
        "--model",
        "tiny",
        "--steps",
        "3",
        "--fp8",
        "rollout_per_tensor",
        "--correction",
        "ais",
    ]
    done = subprocess.run([*command, "--out", str(out), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    log = (out / "train.log").read_text()
    assert "FP8 rollout of 14 of 15 linear layers, actor in bf16, weights per tensor, activations per tensor" in log
    assert (
        "FP8 rollout: 14 linear layers, kernel ReferenceFp8LinearMethod" in log
        and "all bytes equal to the trainer's" in log
    )
    steps = [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    # Two layers of four 256x256 and three 256x512 weights; fourteen float32 scales.
    assert {s["fp8/sync_bytes_per_weight"] for s in steps} == {1 + 14 * 4 / (2 * (4 * 256**2 + 3 * 256 * 512))}
    assert [s["ais/noise_floor_steps"] for s in steps] == [1, 2, 2]
    for s in steps:
        assert s["ais/mini_batches"] == 2.0
        assert s["ais/alpha_min"] <= s["ais/alpha"] <= s["ais/alpha_max"]
        assert s["ais/delta"] == pytest.approx(2 * s["ais/noise_floor"], rel=1e-12)
        assert s["fp8/abs_logp_diff_mean"] > 0
    assert steps[0]["ais/alpha_mis"] == pytest.approx(0.5, abs=0.1)  # the two halves differ a little from their mean
    assert steps[0]["ais/active"] == 1.0

    assert len(files(dump)) == 3
    assert (
        main(["replay", str(dump), "--json", str(tmp_path / "replay.json"), "--html", str(tmp_path / "replay.html")])
        == 0
    )
    replayed = json.loads((tmp_path / "replay.json").read_text())["steps"]
    for s, r in zip(steps, replayed, strict=True):
        assert r["mismatch"]["mean_abs"] == pytest.approx(s["fp8/abs_logp_diff_mean"], rel=1e-6)
        assert r["methods"]["ais"]["ais/delta"] == pytest.approx(s["ais/delta"], rel=1e-6)
        assert r["methods"]["ais"]["ais/cv"] == pytest.approx(s["ais/cv"], rel=1e-9)
    assert "icepop" in capsys.readouterr().out
