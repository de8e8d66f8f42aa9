"""The dump that replay reads (verl_fp8/correction/dump.py): what it keeps, and how a damaged one is named."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tools.runs.dumps import CONFIG, jagged_batch, write_dump
from verl_fp8.__main__ import main
from verl_fp8.correction.dump import SCHEMA, DumpWriter, check_folder, files, flatten, read_step
from verl_fp8.errors import ConfigError
from verl_fp8.switches.settings import DumpSettings


def test_a_file_gives_back_the_batch(tmp_path):
    """Every value, flat and in order, dtypes as the module says, without the padding rows."""
    data, keys, tags = jagged_batch(padding=2)
    DumpWriter(DumpSettings(str(tmp_path)), "r", CONFIG, 1).write(data, keys, tags, 5, 1, method="ais")
    (path,) = files(tmp_path)
    step = read_step(path)
    n = sum(len(row) for row in data["advantages"].unbind()[:10])
    mask = data["response_mask"].values()[:n].bool()
    for name in ("old_log_probs", "rollout_log_probs", "advantages"):
        assert torch.equal(step.tensors[name], torch.where(mask, data[name].values()[:n], 0.0))
    assert torch.equal(step.tensors["response_mask"].bool(), mask)
    assert step.tensors["lengths"].tolist() == [len(row) for row in data["advantages"].unbind()[:10]]
    assert step.tensors["groups"].tolist() == [i // 4 for i in range(10)]
    assert step.step == 5
    assert json.loads(step.metadata["config"]) == CONFIG
    # 13 bytes a token, 12 a response, and the header.
    assert path.stat().st_size < 13 * n + 12 * 10 + 4096


def test_tokens_that_are_not_finite_are_masked_and_counted():
    """So that a value that is not finite in a dump always means a damaged file; under the mask they are nobody's
    business."""
    data, keys, tags = jagged_batch()
    data["old_log_probs"].values()[0] = math.nan
    data["rollout_log_probs"].values()[1] = -math.inf
    masked = int((data["response_mask"].values() == 0).nonzero()[0])
    data["old_log_probs"].values()[masked] = math.nan
    tensors, lost = flatten(data, keys, tags)
    assert lost == 2
    assert tensors["response_mask"][:2].tolist() == [0, 0]
    assert all(bool(t.isfinite().all()) for t in tensors.values())


def test_a_dump_stops_at_its_limits(tmp_path, capfd):
    """dump_steps counts steps, dump_max_bytes bounds the folder; reaching one is said once and training goes on."""
    writer = write_dump(tmp_path / "a", steps=5, settings=DumpSettings(str(tmp_path / "a"), steps=2))
    assert [read_step(p).step for p in files(tmp_path / "a")] == [1, 2]
    assert writer.full
    assert capfd.readouterr().out.count("dump_steps=2 reached") == 1
    size = files(tmp_path / "a")[0].stat().st_size
    write_dump(tmp_path / "b", steps=9, settings=DumpSettings(str(tmp_path / "b"), max_bytes=3 * size + 5000))
    total = sum(p.stat().st_size for p in (tmp_path / "b").iterdir())
    assert 0 < total <= 3 * size + 5000
    assert capfd.readouterr().out.count("dump_max_bytes") == 1


def test_no_half_written_file_is_left(dump):
    """Files are written under another name and moved; the folder holds nothing else."""
    assert sorted(p.name for p in dump.iterdir()) == [f"step_000000{i}_00.safetensors" for i in (1, 2, 3)]


def test_another_runs_dump_is_not_touched(dump):
    """Another run, or the same one starting over, is refused with the key; a resumed one goes on."""
    with pytest.raises(ConfigError, match=r"is_correction\.dump.*of the run a run"):
        check_folder(dump, "another run", resumed=True)
    with pytest.raises(ConfigError, match="starts over"):
        write_dump(dump)
    check_folder(dump, "a run", resumed=True)
    before = {p.name: p.read_bytes() for p in files(dump)}
    write_dump(dump, first_step=3, steps=2)
    assert [read_step(p).step for p in files(dump)] == [1, 2, 3, 4]
    assert files(dump)[0].read_bytes() == before["step_0000001_00.safetensors"]


def test_a_resumed_run_counts_what_is_there(dump):
    """The size limit is the folder's, not the process's."""
    total = sum(p.stat().st_size for p in files(dump))
    writer = write_dump(dump, first_step=4, steps=3, settings=DumpSettings(str(dump), max_bytes=total + 10))
    assert writer.full
    assert len(files(dump)) == 3


def test_the_driver_looks_at_the_folder(dump, tmp_path):
    """The check before Ray starts: this command line would write over another run's dump."""
    from verl_fp8.rules.run import validate_run
    from verl_fp8.tools.overrides import compose

    base = [
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.rollout.name=vllm",
        "algorithm.adv_estimator=grpo",
        "+is_correction=ais",
    ]
    with pytest.raises(ConfigError, match=r"is_correction\.dump"):
        validate_run(compose([*base, f"is_correction.dump={dump}"]))
    validate_run(compose([*base, f"is_correction.dump={tmp_path / 'new'}"]))


def rewrite(path, change, metadata=None):
    """Rewrite a dump file with changed tensors or metadata."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {**header, **(metadata or {})})


DAMAGE = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-40]), "no readable safetensors"),
    "header only": (lambda p: p.write_bytes(p.read_bytes()[:20]), "no readable safetensors"),
    "empty": (lambda p: p.write_bytes(b""), "no readable safetensors"),
    "other schema": (
        lambda p: rewrite(p, lambda t: None, {"schema": "verl_fp8.dump/9"}),
        "schema 'verl_fp8.dump/9'",
    ),
    "no schema": (lambda p: save_file(load_file(p), p), "schema None"),
    "no step": (lambda p: rewrite(p, lambda t: None, {"step": "x"}), "metadata"),
    "config": (lambda p: rewrite(p, lambda t: None, {"config": "[1]"}), "metadata"),
    "nan": (
        lambda p: rewrite(p, lambda t: t["old_log_probs"][3:5].fill_(math.nan)),
        "2 of .* values of old_log_probs not finite",
    ),
    "infinity": (lambda p: rewrite(p, lambda t: t["advantages"][:1].fill_(math.inf)), "advantages not finite"),
    "tensor missing": (lambda p: rewrite(p, lambda t: t.pop("scores")), "tensors advantages"),
    "dtype": (lambda p: rewrite(p, lambda t: t.update(scores=t["scores"].double())), "scores of dtype torch.float64"),
    "shape": (lambda p: rewrite(p, lambda t: t.update(groups=t["groups"][:-1].clone())), "groups of dtype"),
    "lengths": (lambda p: rewrite(p, lambda t: t["lengths"].add_(1)), "lengths that sum"),
    "mask": (lambda p: rewrite(p, lambda t: t["response_mask"].fill_(2)), "response_mask"),
    "another run": (lambda p: rewrite(p, lambda t: None, {"run": "b run"}), "run b run"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_dump_is_named_in_one_sentence(dump, capsys, kind):
    """Exit code 2, the file and what is wrong with it on one line of stderr, no traceback."""
    damage, sentence = DAMAGE[kind]
    damage(files(dump)[1])
    assert main(["replay", str(dump)]) == 2
    printed = capsys.readouterr().err.strip()
    assert re.search(sentence, printed)
    assert "step_0000002_00.safetensors" in printed
    assert "\n" not in printed


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda t: t / "nowhere", "no such folder"),
    (lambda t: t, "no step_"),
])  # fmt: skip
def test_no_dump(tmp_path, capsys, make, sentence):
    """A path that is no dump."""
    assert main(["replay", str(make(tmp_path))]) == 2
    assert sentence in capsys.readouterr().err


def test_the_schema_is_stated():
    """Changing what a file holds needs a new number."""
    assert SCHEMA == "verl_fp8.dump/1"
