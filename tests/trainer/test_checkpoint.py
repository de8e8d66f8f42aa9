"""A checkpoint's recipe beside verl's files: kept resolved, compared on resume; cut files are named."""

import json
import pickle

import pytest
import torch

from verl_fp8.errors import ConfigError, DataError
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.trainer import checkpoint


def identity(capability=None, **node):
    """What the engine stores for a run on a GPU of this compute capability."""
    fp8 = Fp8Settings.parse(node, capability=capability)
    return {"mode": fp8.mode, "recipe": fp8.recipe.to_dict(), "layers": ["a", "b"]}


@pytest.fixture
def actor(tmp_path):
    """global_step_3/actor of a run with fp8.recipe.scale_format=auto on a Hopper."""
    folder = tmp_path / "global_step_3" / "actor"
    folder.mkdir(parents=True)
    checkpoint.write(folder, identity((9, 0)))
    for rank in range(2):
        torch.save({"w": torch.ones(4096)}, folder / f"model_world_size_2_rank_{rank}.pt")
    return folder


def test_the_same_recipe_goes_on(actor):
    """Written and read back: the same run resumes; a checkpoint without the file is stock verl's and resumes too."""
    checkpoint.compare(actor, identity((9, 0)))
    checkpoint.compare(actor, identity((9, 0), recipe={"scale_format": "fp32"}))
    checkpoint.check_files(actor)
    (actor / checkpoint.RECIPE_FILE).unlink()
    checkpoint.compare(actor, identity((9, 0), mode="rollout"))
    assert sorted(p.suffix for p in actor.iterdir()) == [".pt", ".pt"]


@pytest.mark.parametrize(
    ("now", "found"),
    [
        (identity((9, 0), mode="rollout"), "fp8.mode=unified, now rollout"),
        (identity((9, 0), recipe={"weight_block": [64, 64]}), "weight_block=[128, 128], now [64, 64]"),
        (identity((9, 0), recipe={"eps": 1e-4}), "eps=0.0, now 0.0001"),
        (identity((9, 0)) | {"layers": ["a"]}, "2 FP8 layers in the checkpoint, 1 now"),
    ],
    ids=["mode", "blocks", "eps", "layers"],
)
def test_another_recipe_is_refused(actor, now, found):
    """What differs is named, old value and new."""
    with pytest.raises(ConfigError) as caught:
        checkpoint.compare(actor, now)
    assert found in str(caught.value) and "global_step_3" in str(caught.value)


@pytest.mark.parametrize(("before", "after"), [((9, 0), (10, 0)), ((10, 0), (9, 0)), (None, (10, 0))])
def test_another_gpu_generation_is_refused_by_the_key(actor, before, after):
    """scale_format=auto on both: stored is what it resolved to, so the other generation's is another recipe."""
    checkpoint.write(actor, identity(before))
    saved = json.loads((actor / checkpoint.RECIPE_FILE).read_text())["recipe"]["scale_format"]
    assert saved == {None: "fp32", (9, 0): "fp32", (10, 0): "pow2"}[before]
    with pytest.raises(ConfigError) as caught:
        checkpoint.compare(actor, identity(after))
    assert f"set fp8.recipe.scale_format={saved}" in str(caught.value)
    if saved == "pow2":
        checkpoint.compare(actor, identity(after, recipe={"scale_format": "pow2"}))


@pytest.mark.parametrize("size", [0, 1, 60])
def test_a_cut_recipe_is_named(actor, size):
    """A file that ends early is no checkpoint of stock verl: refused with its path."""
    path = actor / checkpoint.RECIPE_FILE
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError) as caught:
        checkpoint.compare(actor, identity((9, 0)))
    assert f"{path} ({size} bytes)" in str(caught.value) and "trainer.resume_from_path" in str(caught.value)


@pytest.mark.parametrize("part", [0, 1, 0.5, -1])
def test_a_cut_shard_is_named(actor, part):
    """torch's own error names no file; only the rank's own files are read by a rank."""
    path = actor / "model_world_size_2_rank_1.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part) if part == 0.5 else part])
    with pytest.raises((OSError, RuntimeError, EOFError, pickle.UnpicklingError)) as torchs:
        torch.load(path, weights_only=False)
    assert "rank_1" not in str(torchs.value)
    checkpoint.check_files(actor, rank=0)
    for rank in (1, None):
        with pytest.raises(DataError, match="model_world_size_2_rank_1.pt"):
            checkpoint.check_files(actor, rank)
