"""The dump that ``is_correction.dump`` writes and ``verl-fp8 replay`` reads: one safetensors file a batch.

A file holds what every correction is a function of, before any of them acted, in flat form: the tokens of all responses
end to end, and the length of each. That is 13 bytes a token. Tensors, with T tokens in R responses:

    old_log_probs      float32 (T)   log-probs of the sampled tokens under the trainer, nats; 0 where response_mask is
    rollout_log_probs  float32 (T)   the same under the rollout engine
    advantages         float32 (T)   as verl computed them
    response_mask      uint8   (T)   1 at tokens that count
    lengths            int32   (R)   tokens of each response, mask or not
    scores             float32 (R)   sum of the reward over a response
    groups             int32   (R)   responses to one prompt share a number

verl's padding rows are left out, and tokens whose log-probs are not finite are masked out and counted in the metadata,
so a value that is not finite always means a damaged file. The metadata has ``schema``, ``run``, ``step``, ``method``,
``nonfinite_tokens``, ``rejected_fraction`` and ``config`` (JSON of the settings that bear on corrections).
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tensordict import TensorDict

from verl_fp8.errors import ConfigError, DataError
from verl_fp8.switches.settings import DumpSettings

SCHEMA = "verl_fp8.dump/1"
PATTERN = "step_*.safetensors"
PER_TOKEN = {
    "old_log_probs": torch.float32,
    "rollout_log_probs": torch.float32,
    "advantages": torch.float32,
    "response_mask": torch.uint8,
}
PER_RESPONSE = {"lengths": torch.int32, "scores": torch.float32, "groups": torch.int32}


def files(folder: Path) -> list[Path]:
    """The files of a dump in the order of the steps."""
    return sorted(folder.glob(PATTERN))


def check_folder(folder: Path, run: str, *, resumed: bool) -> None:
    """Refuse to mix two runs in one folder. A resumed run goes on in its own and replaces the steps it repeats.

    Args:
        run: the run's identity, as :func:`run_of` gives it.

    Raises:
        ConfigError: the folder holds another run's dump, or this run starts over.
    """
    found = files(folder)
    if not found:
        return
    fix = f"set is_correction.dump to a new folder, or remove {folder}"
    try:
        owner = read_header(found[0])["run"]
    except DataError as error:
        raise ConfigError(
            f"is_correction.dump={folder}", f"files there that cannot be read ({error.found})", fix
        ) from error
    if owner != run or not resumed:
        what = "of this run, which starts over" if owner == run else f"of the run {owner}"
        raise ConfigError(f"is_correction.dump={folder}", f"a dump {what} ({len(found)} files)", fix)


def run_of(config: Mapping[str, Any]) -> str:
    """What tells runs apart, and stays the same when one is resumed."""
    trainer = config["trainer"]
    return f"{trainer['project_name']}/{trainer['experiment_name']} in {trainer['default_local_dir']}"


class DumpWriter:
    """Writes the dump of one run and stops, saying so once, when a limit is reached.

    Args:
        settings: folder and limits.
        run: :func:`run_of` the configuration.
        config: settings to keep beside the data, JSON-serialisable.
        first_step: the training step at hand; above 1 the run was resumed.

    Raises:
        ConfigError: see :func:`check_folder`; or the folder cannot be written.
    """

    def __init__(self, settings: DumpSettings, run: str, config: Mapping[str, Any], first_step: int) -> None:
        self.settings, self.run, self.config = settings, run, json.dumps(config, sort_keys=True)
        self.folder = Path(settings.folder)
        check_folder(self.folder, run, resumed=first_step > 1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"is_correction.dump={self.folder}", f"not a folder to write ({error})", "set another one"
            ) from error
        self.sizes = {path.name: path.stat().st_size for path in files(self.folder)}
        self.full = False

    def write(
        self, data: TensorDict, keys: list[str], tags: list[dict], step: int, part: int, **metadata: str
    ) -> dict[str, float]:
        """Write one batch.

        Args:
            data: jagged nested ``old_log_probs``, ``rollout_log_probs``, ``advantages``, ``response_mask``,
                ``rm_scores``.
            keys: verl's keys of the rows, ``{uid}_{session}_{index}``.
            tags: verl's tags of the rows; rows with ``is_padding`` are left out.
            step: training step.
            part: number of the batch within the step.

        Returns:
            ``fp8/dump_bytes``, the size of the dump.
        """
        name = f"step_{step:07d}_{part:02d}.safetensors"
        steps = {file.split("_")[1] for file in self.sizes} | {f"{step:07d}"}
        if self.settings.steps is not None and len(steps) > self.settings.steps:
            self._stop(f"is_correction.dump_steps={self.settings.steps}")
        if not self.full:
            tensors, lost = flatten(data, keys, tags)
            # Beside the tensors a file has the metadata and a table of seven tensors (at most about 1 KiB).
            size = sum(t.numel() * t.element_size() for t in tensors.values()) + len(self.config) + 4096
            if sum(self.sizes.values()) - self.sizes.get(name, 0) + size > self.settings.max_bytes:
                self._stop(f"is_correction.dump_max_bytes={self.settings.max_bytes}")
        if not self.full:
            path, temporary = self.folder / name, self.folder / f".{name}.{os.getpid()}"
            header = {
                "schema": SCHEMA,
                "run": self.run,
                "step": str(step),
                "config": self.config,
                "nonfinite_tokens": str(lost),
            }
            temporary.write_bytes(save(tensors, header | metadata))
            os.replace(temporary, path)
            self.sizes[name] = path.stat().st_size
        return {"fp8/dump_bytes": float(sum(self.sizes.values()))}

    def _stop(self, limit: str) -> None:
        if not self.full:
            print(f"dump in {self.folder} is complete: {limit} reached with {len(self.sizes)} files", flush=True)
        self.full = True


def flatten(data: TensorDict, keys: list[str], tags: list[dict]) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of a file from verl's jagged batch, and the number of tokens masked out as not finite."""
    real = [i for i, tag in enumerate(tags) if not tag.get("is_padding", False)]
    lengths = data["response_mask"].offsets().diff()
    rows = torch.zeros(len(keys), dtype=torch.bool)
    rows[real] = True
    tokens = rows.repeat_interleave(lengths)
    flat = {name: data[name].values()[tokens].float() for name in PER_TOKEN}
    keep = flat["response_mask"] != 0
    finite = flat["old_log_probs"].isfinite() & flat["rollout_log_probs"].isfinite()
    lost = int((keep & ~finite).sum())
    keep &= finite
    out = {name: torch.where(keep, flat[name], 0.0).to(dtype) for name, dtype in PER_TOKEN.items()}
    out["response_mask"] = keep.to(torch.uint8)
    groups: dict[str, int] = {}
    out["lengths"] = lengths[real].to(torch.int32)
    scores = data["rm_scores"]
    row_of_score = torch.arange(len(keys)).repeat_interleave(scores.offsets().diff())
    out["scores"] = torch.zeros(len(keys)).index_add_(0, row_of_score, scores.values().float())[real]
    out["groups"] = torch.tensor(
        [groups.setdefault(keys[i].rsplit("_", 2)[0], len(groups)) for i in real], dtype=torch.int32
    )
    return {name: tensor.contiguous() for name, tensor in out.items()}, lost


@dataclass(frozen=True, eq=False)
class DumpStep:
    """One file, checked.

    Attributes:
        step: training step.
        metadata: the file's metadata.
        tensors: see the module's docstring.
    """

    step: int
    metadata: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]

    @property
    def n_tokens(self) -> int:
        """Tokens in the file, mask or not."""
        return self.tensors["old_log_probs"].numel()

    def row_blocks(self, limit: float) -> Iterator[tuple[slice, torch.Tensor, dict[str, torch.Tensor]]]:
        """Consecutive responses as padded (rows, longest of them) tensors of at most `limit` elements, or one row.

        Yields:
            The slice of the flat tokens; a bool mask of the places they have in the padded tensors, in their order; and
            ``old_log_probs``, ``rollout_log_probs``, ``advantages``, ``response_mask``, padded with zeros.
        """
        lengths = self.tensors["lengths"].tolist()
        start = token = 0
        while start < len(lengths):
            stop, longest = start, 0
            while stop < len(lengths) and (stop == start or (stop + 1 - start) * max(longest, lengths[stop]) <= limit):
                longest = max(longest, lengths[stop])
                stop += 1
            part = torch.tensor(lengths[start:stop])
            inside = torch.arange(longest) < part[:, None]
            flat = slice(token, token + int(part.sum()))
            block = {}
            for name in PER_TOKEN:
                padded = self.tensors[name].new_zeros(inside.shape)
                padded[inside] = self.tensors[name][flat]
                block[name] = padded
            yield flat, inside, block
            start, token = stop, flat.stop


def read_header(path: Path) -> dict[str, str]:
    """The metadata of one file.

    Raises:
        DataError: no safetensors file, truncated, or of another schema.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(
            f"the dump file {path}", f"no readable safetensors file ({_one_line(error)})", _AGAIN
        ) from error
    found = metadata.get("schema")
    if found != SCHEMA:
        fix = f"replay takes what is_correction.dump writes; this version reads {SCHEMA}"
        raise DataError(f"the dump file {path}", f"schema {found!r}", fix)
    try:
        if int(metadata["step"]) < 0 or not metadata["run"] or not isinstance(json.loads(metadata["config"]), dict):
            raise ValueError("a negative step, no run or no settings")
    except (KeyError, ValueError) as error:
        raise DataError(
            f"the dump file {path}", f"metadata that cannot be read ({_one_line(error)})", _AGAIN
        ) from error
    return metadata


def read_step(path: Path) -> DumpStep:
    """Read and check one file.

    Raises:
        DataError: truncated, of another schema, tensors missing or of other shapes or dtypes, or a value that is not
            finite.
    """
    asked, metadata = f"the dump file {path}", read_header(path)
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(asked, f"tensors that cannot be read ({_one_line(error)})", _AGAIN) from error
    expected = {**PER_TOKEN, **PER_RESPONSE}
    if set(tensors) != set(expected):
        raise DataError(
            asked, f"tensors {', '.join(sorted(tensors)) or 'none'}", f"write {', '.join(sorted(expected))}"
        )
    n_responses, n_tokens = tensors["lengths"].numel(), tensors["old_log_probs"].numel()
    for name, dtype in expected.items():
        shape = (n_tokens,) if name in PER_TOKEN else (n_responses,)
        if tensors[name].dtype != dtype or tuple(tensors[name].shape) != shape:
            found = f"{name} of dtype {tensors[name].dtype} and shape {tuple(tensors[name].shape)}"
            raise DataError(asked, found, f"write {dtype} of shape {shape}")
        if dtype.is_floating_point and not bool(tensors[name].isfinite().all()):
            bad = int((~tensors[name].isfinite()).sum())
            raise DataError(asked, f"{bad} of {tensors[name].numel()} values of {name} not finite", _AGAIN)
    if bool((tensors["lengths"] < 0).any()) or int(tensors["lengths"].sum()) != n_tokens:
        raise DataError(asked, f"lengths that sum to {int(tensors['lengths'].sum())} for {n_tokens} tokens", _AGAIN)
    if bool((tensors["response_mask"] > 1).any()):
        raise DataError(asked, "a response_mask with values beside 0 and 1", _AGAIN)
    return DumpStep(int(metadata["step"]), metadata, tensors)


_AGAIN = "remove the file, or dump the run again"


def _one_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
