"""A resumed run goes on with its checkpoint's recipe: judged on the driver, as far as it knows."""

import pytest

from tests.driver import SWITCHES
from tests.rules.lines import said
from verl_fp8.errors import ConfigError
from verl_fp8.rules import resume
from verl_fp8.switches.hardware import Hardware, assume
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.trainer import checkpoint


@pytest.fixture
def hopper_run(tmp_path):
    """verl's configuration node ``trainer`` of a run on a Hopper that left a checkpoint of step 3."""
    folder = tmp_path / "global_step_3" / "actor"
    folder.mkdir(parents=True)
    fp8 = Fp8Settings.parse({}, capability=(9, 0))
    checkpoint.write(folder, {"mode": fp8.mode, "recipe": fp8.recipe.to_dict(), "layers": ["a", "b"]})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    return {"resume_mode": "auto", "default_local_dir": str(tmp_path)}


def test_a_cut_tracker_is_named(tmp_path):
    """verl's latest_checkpointed_iteration.txt without a number."""
    trainer = {"resume_mode": "auto", "default_local_dir": str(tmp_path)}
    assert resume.resumed(trainer) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    with pytest.raises(ConfigError, match="latest_checkpointed_iteration.txt"):
        resume.resumed(trainer)


def test_the_driver_judges_what_it_knows(hopper_run):
    """A driver without the GPU cannot tell what auto means: the recipe is left to the workers, the rest is judged."""
    trainer = hopper_run
    blackwell = Fp8Settings.parse({}, capability=(10, 0))
    resume.check_resume(trainer, blackwell, known=False)
    with pytest.raises(ConfigError, match="fp8.recipe.scale_format=fp32"):
        resume.check_resume(trainer, blackwell, known=True)
    with pytest.raises(ConfigError, match="fp8.mode"):
        resume.check_resume(trainer, Fp8Settings.parse({"mode": "rollout"}, capability=None), known=False)
    resume.check_resume(trainer | {"resume_mode": "disable"}, blackwell, known=True)


def test_a_checkpoint_is_judged_on_the_driver(tiny_model, tmp_path):
    """Another recipe, another GPU generation and a cut file stop before Ray starts; the same recipe passes."""
    folder = tmp_path / "global_step_3" / "actor"
    folder.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    line = [*SWITCHES, "trainer.resume_mode=auto", f"trainer.default_local_dir={tmp_path}"]
    saved = Fp8Settings.parse({"mode": "unified"}, capability=None)
    checkpoint.write(folder, {"mode": "unified", "recipe": saved.recipe.to_dict(), "layers": []})
    assert said(tiny_model, line) is None
    assert "scale_format='fp32', now 'pow2'" in said(tiny_model, [*line, "fp8.recipe.scale_format=pow2"])
    blackwell = Hardware(capability=(10, 0), cuda=(13, 0), transformer_engine="2.20.2")
    with assume(blackwell):
        assert "set fp8.recipe.scale_format=fp32" in said(tiny_model, line)
    cut = folder / "optim_world_size_1_rank_0.pt"
    cut.write_bytes(b"PK\x03\x04cut")
    assert str(cut) in said(tiny_model, line)
    assert said(tiny_model, [*line, "trainer.resume_mode=disable"]) is None
