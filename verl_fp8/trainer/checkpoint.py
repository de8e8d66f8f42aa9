"""The recipe a checkpoint was trained with, kept beside verl's files, and the check that those files are whole.

A resume with another recipe would train on without a word. So the engine writes ``fp8_recipe.json`` into each
checkpoint, and a resume compares it with the run: the recipe is the same, or the run ends. The file holds what
``scale_format=auto`` resolved to. Another generation of GPUs may resolve it otherwise, and that is another recipe.
"""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

from verl_fp8.errors import ConfigError, DataError

RECIPE_FILE = "fp8_recipe.json"
KEYS = ("mode", "recipe", "layers")


def write(folder: Path, identity: dict[str, Any]) -> None:
    """Store the identity (``KEYS``), whole or not at all."""
    part = folder / f".{RECIPE_FILE}.part"
    part.write_text(json.dumps(identity, indent=2))
    part.replace(folder / RECIPE_FILE)


def compare(folder: Path, now: dict[str, Any]) -> None:
    """Refuse a checkpoint of another recipe; one without :data:`RECIPE_FILE` is stock verl's and may go on.

    Stock verl's holds the same fp32 masters: continuing it in FP8 is a choice, not a mix-up.

    Args:
        folder: of the actor, ``global_step_N/actor``.
        now: the run's identity, or the part of it that is known.

    Raises:
        ConfigError: names what differs.
        DataError: the file is cut or unreadable.
    """
    path = folder / RECIPE_FILE
    if not path.exists():
        return
    saved = _read(path)
    key = next((k for k in KEYS if k in now and saved[k] != now[k]), None)
    if key is None:
        return
    fix = "set fp8.mode and fp8.recipe.* as before"
    if key == "layers":
        found = f"{len(saved['layers'])} FP8 layers in the checkpoint, {len(now['layers'])} now"
    elif key == "mode":
        found = f"the checkpoint was trained with fp8.mode={saved['mode']}, now {now['mode']}"
    else:
        before, after = saved["recipe"], now["recipe"]
        different = [k for k in {**before, **after} if before.get(k) != after.get(k)]
        changes = "; ".join(f"{k}={before.get(k)!r}, now {after.get(k)!r}" for k in different)
        found = f"the checkpoint was trained with {changes}"
        if different == ["scale_format"]:
            # What auto resolves to on another GPU generation.
            fix = (
                f"set fp8.recipe.scale_format={before['scale_format']} "
                "(fp32 needs a GPU older than compute capability 10.0)"
            )
    raise ConfigError(
        f"resume from {folder.parent.name} with the recipe it was trained with",
        found,
        f"{fix}, or start from its exported model instead of resuming",
    )


def check_files(folder: Path, rank: int | None = None) -> None:
    """Refuse files of verl's that torch would fail to read without saying which.

    Args:
        folder: of the actor.
        rank: only the files of this rank.

    Raises:
        DataError: names the file.
    """
    for path in sorted(folder.glob("*.pt" if rank is None else f"*_rank_{rank}.pt")):
        with path.open("rb") as file:
            start = file.read(2)
        # torch.save writes a zip archive, whose directory comes last.
        if len(start) < 2 or (start == b"PK" and not zipfile.is_zipfile(path)):
            raise _cut(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text())
        return {key: saved[key] for key in KEYS}
    except (ValueError, KeyError, TypeError) as error:
        raise _cut(path) from error


def _cut(path: Path) -> DataError:
    return DataError(
        f"resume from {path.parent.parent.name}",
        f"a cut file: {path} ({os.path.getsize(path)} bytes)",
        "resume from an earlier checkpoint: trainer.resume_mode=resume_path and trainer.resume_from_path",
    )
