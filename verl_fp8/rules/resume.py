"""Whether a checkpoint was trained with the recipe that is asked for now; judged on the driver."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_fp8.errors import ConfigError
from verl_fp8.rules.asked import Run
from verl_fp8.rules.refuse import Refusal, caught
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.trainer.checkpoint import check_files, compare


def resumed(trainer: Mapping[str, Any]) -> Path | None:
    """The folder that verl will resume from, None for a start from the beginning.

    Args:
        trainer: the configuration node.

    Raises:
        ConfigError: the file that names the last step is cut.
    """
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename

    mode = trainer.get("resume_mode", "auto")
    if mode == "resume_path":
        return Path(str(trainer.get("resume_from_path")))
    if mode != "auto":
        return None
    folder = trainer.get("default_local_dir")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it finds
            latest = find_latest_ckpt_path(folder)
    except ValueError as error:
        raise ConfigError(
            "trainer.resume_mode=auto",
            f"no step number in {get_checkpoint_tracker_filename(folder)}",
            "write the number of the last whole checkpoint into it, or set trainer.resume_mode=resume_path",
        ) from error
    return None if latest is None else Path(latest)


def the_checkpoint_goes_on(run: Run) -> Iterator[Refusal]:
    """A run that resumes has the recipe its checkpoint was trained with, and the checkpoint's files are whole."""
    yield from caught(check_resume, run.config.trainer, run.fp8, known=run.machine_will_train)


def check_resume(trainer: Mapping[str, Any], fp8: Fp8Settings, *, known: bool) -> None:
    """Judge the checkpoint where the driver sees it; the workers do the same with what they see.

    Args:
        trainer: the configuration node.
        fp8: the run's settings.
        known: this machine is of the kind that will train, so that ``auto`` means here what it means there.

    Raises:
        ConfigError: another recipe.
        DataError: a cut file.
    """
    step = resumed(trainer)
    if step is None or not (step / "actor").is_dir():
        return
    now: dict[str, Any] = {"mode": fp8.mode}
    if known or fp8.scale_format != "auto":
        now["recipe"] = fp8.recipe.to_dict()
    compare(step / "actor", now)
    check_files(step / "actor")
