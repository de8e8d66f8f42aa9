"""``verl-fp8 check <verl overrides>``: compose and validate as ``python -m verl.trainer.main_ppo`` would with them.

The run is judged for this machine, or for another one: ``verl-fp8 check --capability 9.0 <verl overrides>``. That
machine has GPUs of this compute capability, CUDA 13.0, TransformerEngine 2.20.2 and megatron-core 0.19.2.
``--cuda 12.8``, ``--transformer-engine none`` and ``--megatron-core none`` (or a version) say otherwise.
"""

import contextlib
import os
import sys
from collections import Counter

from verl_fp8.switches.hardware import assume, probe
from verl_fp8.tools.overrides import compose, machine, root_cause, validate


def check_command(overrides: list[str]) -> int:
    """Exit 0 and a summary, or exit 2 and one sentence on stderr."""
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    try:
        assumed, overrides = machine(overrides)
        with contextlib.nullcontext() if assumed is None else assume(assumed):
            summary = validate(compose(overrides))
            here = probe()
    except Exception as error:  # whatever refuses the run is the answer
        print(f"refused: {root_cause(error)}", file=sys.stderr)
        return 2
    if summary.fp8 is None and summary.correction is None:
        print("ok: stock verl; neither +fp8 nor +is_correction is selected")
        return 0
    if summary.fp8 is not None:
        fp8, recipe = summary.fp8, summary.fp8.recipe
        total = len(summary.converted) + len(summary.kept)
        print(
            f"ok: fp8=bf16, none of {total} linear layers in FP8, lm_head {fp8.lm_head}"
            if fp8.layer_filter is None
            else f"ok: fp8={fp8.mode}, {len(summary.converted)} of {total} linear layers in FP8 {recipe.fmt}, "
            f"{recipe.granularity}, scales "
            f"{fp8.scale_format}{'' if fp8.scale_format != 'auto' else f' (here {recipe.scale_format})'}, backward "
            f"{recipe.backward}, sync {fp8.weight_sync}, backend {fp8.backend}"
        )
        if summary.backend is not None:
            print(f"    {'on' if assumed else 'here'}: {here}: trainer {summary.backend}, vLLM kernel {summary.kernel}")
        for reason, count in Counter(summary.kept.values()).most_common():
            print(f"    {count} kept in bf16: {reason}")
    if summary.correction is not None:
        correction, shown = summary.correction, dict(summary.correction.parameters)
        if correction.method == "ais":
            shown |= {"scope": correction.scope, "mode": correction.mode}
            if shown.get("delta") == "auto":
                shown |= {"delta_factor": correction.delta_factor, "delta_steps": correction.delta_steps}
        if correction.dump is not None:
            steps = "all steps" if correction.dump.steps is None else f"{correction.dump.steps} steps"
            shown["dump"] = f"{correction.dump.folder} ({steps}, up to {correction.dump.max_bytes} bytes)"
        parameters = ", ".join(f"{k}={v}" for k, v in shown.items())
        print(f"ok: is_correction={correction.method}{f' ({parameters})' if parameters else ''}")
    return 0
