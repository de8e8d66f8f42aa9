"""``verl-fp8 replay``: every method computes what verl or AIS would have computed in the run."""

import subprocess
import sys

import pytest
import torch

from tests.tools.runs.dumps import CONFIG, jagged_batch, padded
from verl_fp8.__main__ import main
from verl_fp8.correction.ais import AISConfig, ais_weights
from verl_fp8.correction.dump import DumpWriter, files, read_step
from verl_fp8.correction.reweight import AISState
from verl_fp8.correction.verls_methods import rollout_correction
from verl_fp8.switches.settings import METHOD_KEYS, DumpSettings
from verl_fp8.tools.runs.replay import edges, methods, weigh


@pytest.mark.parametrize("method", ["tis", "tis_seq", "icepop", "mis", "geo_rs", "k3_rs"])
@pytest.mark.parametrize("normalize", [False, True])
def test_verls_methods_are_verls(dump, method, normalize, monkeypatch):
    """Weights and kept tokens equal one call of verl's function on the whole padded batch, though replay cuts it into
    blocks."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    from verl_fp8.tools.runs import replay as module

    if normalize and method in ("geo_rs", "k3_rs"):
        pytest.skip("no weights to normalise")
    monkeypatch.setattr(module, "_BLOCK", 64)
    step = read_step(files(dump)[0])
    wide = {
        "geo_rs": ["geo_rs.low=0.99", "geo_rs.high=1.01"],
        "icepop": ["icepop.low=0.95", "icepop.high=1.1"],
        "tis": ["tis.clip=1.1"],
        "k3_rs": ["k3_rs.max_k3=0.004"],
    }
    settings = methods([*wide.get(method, []), *([f"{method}.batch_normalize=true"] if normalize else [])])[method]
    weights, kept, _ = weigh(step, settings, AISState())
    node = {k: v for k, v in rollout_correction(settings).items() if k != "bypass_mode"}
    inside, block = padded(step)
    proto, mask, _ = compute_rollout_correction_and_rejection_mask(
        block["old_log_probs"], block["rollout_log_probs"], block["response_mask"].float(), **node
    )
    valid = step.tensors["response_mask"].bool()
    assert torch.equal(kept, mask[inside] > 0)
    if proto is not None:
        assert torch.equal(weights[valid], proto.batch["rollout_is_weights"][inside][valid])
    else:
        assert bool((weights == 1).all())
    assert (
        method == "tis_seq" or normalize or bool((kept != valid).any() | (weights != weights.clamp(0.95, 1.0999)).any())
    )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ais_is_ais(dump, level):
    """The weights of ais_weights on the padded batch; alpha to float64 rounding, since token level regroups the
    rows."""
    step = read_step(files(dump)[0])
    weights, kept, metrics = weigh(step, methods([f"ais.level={level}"])["ais"], AISState())
    inside, block = padded(step)
    mask = block["response_mask"].bool()
    result = ais_weights(
        block["old_log_probs"], block["rollout_log_probs"], block["advantages"], mask, AISConfig(level=level)
    )
    assert metrics["ais/alpha"] == pytest.approx(result.alpha, rel=1e-12)
    assert torch.allclose(
        weights[step.tensors["response_mask"].bool()], result.weights[inside][mask[inside]], rtol=2**-22, atol=0
    )
    assert torch.equal(kept, step.tensors["response_mask"].bool())


def test_all_methods_with_the_groups_own_values():
    """Every method of the switch, and AIS with delta=auto; each with what its group says."""
    found = methods([])
    assert set(found) == {*METHOD_KEYS, "ais_auto"}
    assert found["icepop"].parameters["high"] == 5.0
    assert found["ais_auto"].parameters["delta"] == "auto"


def test_the_runs_own_values_and_overrides():
    """The run's own method comes with its own values; --set wins over both."""
    own = {"method": "ais", "clip": 3.0, "delta": 0.5, "scope": "mini_batch", "dump": "/x"}
    found = methods(["tis.clip=9", "ais.gamma=2"], own)
    assert found["ais"].parameters["clip"] == 3.0
    assert found["ais"].parameters["gamma"] == 2
    assert found["tis"].parameters["clip"] == 9


@pytest.mark.parametrize(
    "override", ["foo.clip=1", "tis=1", "tis.clip", "tis.delta=1", "tis.clip=[", "ais.clip=-1", "tis.clip=x"]
)
def test_a_wrong_override_is_named(dump, capsys, override):
    """--set with an unknown method or key, or a bad value: exit code 2 and one line."""
    assert main(["replay", str(dump), "--set", override]) == 2
    printed = capsys.readouterr().err.strip()
    assert "\n" not in printed
    assert "is_correction" in printed or override in printed


@pytest.mark.parametrize(
    ("size", "equal", "meant"), [(5, None, [0, 1, 2, 4, 8]), (1, None, [0, 1]), (0, 4, [0]), (7, 3, [0, 3, 6, 7])]
)
def test_edges_cover_everything(size, equal, meant):
    """Octaves, or equal bins."""
    assert edges(size, equal=equal) == meant


def test_an_output_that_cannot_be_written_is_named(dump, tmp_path, capsys):
    """A folder that is not there."""
    assert main(["replay", str(dump), "--html", str(tmp_path / "no" / "r.html")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_batch_without_tokens_or_advantages(tmp_path, capsys):
    """Masks of 0 everywhere, and A = 0 everywhere: figures that do not exist are left out, nothing divides by 0."""
    for name, padding, zero in (("a", 12, False), ("b", 0, True)):
        writer = DumpWriter(DumpSettings(str(tmp_path / name)), "r", CONFIG, 1)
        data, keys, _ = jagged_batch(padding=padding)
        if zero:
            data["advantages"] = data["advantages"] * 0
        writer.write(data, keys, [{}] * len(keys), 1, 0, method="none")
        assert (
            main(["replay", str(tmp_path / name), "--json", str(tmp_path / "j"), "--html", str(tmp_path / "h")]) == 0
        ), capsys.readouterr().err


@pytest.mark.slow
def test_replay_keeps_one_batch_in_memory(tmp_path):
    """Twelve files of a million tokens (156 MB) replay within 2 GiB, libraries included; measured by the kernel."""
    folder = tmp_path / "big"
    writer = DumpWriter(DumpSettings(str(folder)), "r", CONFIG, 1)
    data, keys, tags = jagged_batch(rows=1000, longest=2000)
    for step in range(1, 13):
        writer.write(data, keys, tags, step, 0, method="none")
    code = (
        "import resource, sys; from verl_fp8.__main__ import main; code = main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", str(folder)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) * 1024 < 2 * 2**30
