"""Dumps to test with: batches as verl keeps them, written by the writer of a run."""

import math

import torch
from tensordict import TensorDict

from verl_fp8.correction.dump import DumpStep, DumpWriter
from verl_fp8.switches.settings import DumpSettings

CONFIG = {"is_correction": {"method": "none"}, "adv_estimator": "grpo", "model": "a/model", "fp8": {"mode": "unified"}}


def jagged_batch(seed=0, rows=12, longest=40, spread=0.1, padding=0):
    """A batch as verl keeps it: jagged tensors, keys and tags. Rows 4 and 5 have a masked stretch, as tool calls
    leave."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=g).tolist()
    old = [-2 * torch.rand(n, generator=g) for n in lengths]
    data = {
        "old_log_probs": old,
        "rollout_log_probs": [row + spread * torch.randn(len(row), generator=g) for row in old],
        "advantages": [torch.randn(1, generator=g).expand(n).clone() for n in lengths],
        "response_mask": [
            (torch.arange(n) % 3 > 0).long() if i in (4, 5) else torch.ones(n, dtype=torch.int64)
            for i, n in enumerate(lengths)
        ],
        "rm_scores": [torch.nn.functional.pad(torch.rand(1, generator=g), (n - 1, 0)) for n in lengths],
    }
    for i in range(rows - padding, rows):
        data["response_mask"][i].zero_()
    nested = {name: torch.nested.as_nested_tensor(value, layout=torch.jagged) for name, value in data.items()}
    keys = [f"prompt{i // 4}_{i % 4}_0" for i in range(rows)]
    return TensorDict(nested, batch_size=rows), keys, [{"is_padding": i >= rows - padding} for i in range(rows)]


def write_dump(folder, *, steps=2, run="a run", config=CONFIG, settings=None, first_step=1, **batch):
    """A dump of `steps` batches through the writer; the writer."""
    writer = DumpWriter(settings or DumpSettings(str(folder)), run, config, first_step)
    for step in range(first_step, first_step + steps):
        writer.write(
            *jagged_batch(seed=step, **batch),
            step,
            0,
            method=config["is_correction"]["method"],
            rejected_fraction="0.0",
        )
    return writer


def padded(step):
    """The whole batch as verl pads it."""
    (_, inside, block), *_ = step.row_blocks(math.inf)
    return inside, block


def step_of(old, rollout, advantages, mask, lengths):
    """A DumpStep from lists."""
    return DumpStep(
        1,
        {},
        {
            "old_log_probs": torch.tensor(old),
            "rollout_log_probs": torch.tensor(rollout),
            "advantages": torch.tensor(advantages),
            "response_mask": torch.tensor(mask, dtype=torch.uint8),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
            "scores": torch.zeros(len(lengths)),
            "groups": torch.zeros(len(lengths), dtype=torch.int32),
        },
    )
