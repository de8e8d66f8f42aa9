"""``verl-fp8 check <verl overrides>``: compose and validate as ``python -m verl.trainer.main_ppo <verl overrides>`` would.

Judged for this machine, or for another one: ``verl-fp8 check --capability 9.0 <verl overrides>``. That machine has one GPU
model of this compute capability, CUDA 13.0, TransformerEngine 2.20.2 and megatron-core 0.19.2; ``--cuda 12.8``,
``--transformer-engine none`` and ``--megatron-core none`` (or a version) say otherwise.
"""

import contextlib
import io
import os
import sys
import unicodedata
from collections import Counter
from pathlib import Path

from omegaconf import DictConfig

from verl_fp8.errors import ConfigError, Fp8Error
from verl_fp8.hardware import Hardware, assume, probe

# Composing must leave nothing behind: no run folder, no log file.
_QUIET = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled", "hydra/hydra_logging=disabled"]


def compose(overrides: list[str]) -> DictConfig:
    """The configuration verl's entry point would get, through ``hydra.main`` itself (``--config-dir`` and so on work).

    Raises:
        ValueError: Hydra refused; the message is its own.
    """
    import hydra
    import verl

    found: list[DictConfig] = []
    config_dir = str(Path(verl.__file__).parent / "trainer" / "config")

    @hydra.main(config_path=config_dir, config_name="ppo_trainer", version_base=None)
    def keep(config: DictConfig) -> None:
        found.append(config)

    argv, messages = sys.argv, io.StringIO()
    sys.argv = ["verl-fp8 check", *overrides, *_QUIET]
    try:
        with contextlib.redirect_stderr(messages), contextlib.suppress(SystemExit):
            keep()
    finally:
        sys.argv = argv
    if len(found) != 1:
        raise ValueError(_hydra_said(messages.getvalue(), overrides))
    return found[0]


def _hydra_said(text: str, overrides: list[str]) -> str:
    """Hydra's refusal as one sentence: without usage and traceback, and naming characters that only look right."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line]
    if usage := [line.partition(": error: ")[2] for line in lines if ": error: " in line]:
        # After an option without a value argparse takes no more overrides, and says so of those added here.
        left = [word for word in usage[0].split() if word not in _QUIET]
        lines = [] if left == ["unrecognized", "arguments:"] else [" ".join(left)]
    elif any(line.startswith("Traceback") for line in lines):
        lines = lines[-1:]
    odd = {c: o for o in overrides for c in o if not c.isascii()}
    lines += [f"({o!r} holds {c!r}, {unicodedata.name(c, 'which has no name')})" for c, o in odd.items()]
    return " ".join(lines) or "Hydra composed no single run: leave --multirun, --cfg and --info away"


def validate(config: DictConfig):
    """Run verl's own ``validate_config``, which reaches ours, and return our summary.

    Raises:
        Fp8Error: ours, unwrapped from Hydra's.
        Exception: verl's own refusals, unchanged.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from verl_fp8.validate import validate_run

    # The group silently absent leaves a string where no class of ours would ever look.
    summary = validate_run(config)
    auto_set_device(config)
    with contextlib.redirect_stdout(io.StringIO()):
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    return summary


def root_cause(error: BaseException) -> BaseException:
    """Our own error behind Hydra's InstantiationException, or the error itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Fp8Error):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def machine(overrides: list[str]) -> tuple[Hardware | None, list[str]]:
    """Take this command's own options out: (the machine they describe, None for this one; the rest).

    Raises:
        ConfigError: an option without a value it can take, or one that needs ``--capability``.
    """
    options, rest, pending = {}, [], list(overrides)
    while pending:
        argument = pending.pop(0)
        name, given, value = argument.partition("=")
        if name in ("--capability", "--cuda", "--transformer-engine", "--megatron-core"):
            options[name] = value if given else pending.pop(0) if pending else ""
        else:
            rest.append(argument)
    if not options:
        return None, rest
    if "--capability" not in options:
        raise ConfigError(" ".join(options), "no --capability beside it", "give --capability 9.0 (Hopper) or 10.0 (Blackwell)")
    te, megatron = options.get("--transformer-engine", "2.20.2"), options.get("--megatron-core", "0.19.2")
    return Hardware(
        capability=_version("--capability", options["--capability"]),
        cuda=_version("--cuda", options.get("--cuda", "13.0")),
        transformer_engine=None if te == "none" else te,
        megatron_core=None if megatron == "none" else megatron,
    ), rest


def _version(option: str, text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ConfigError(f"{option} {text}", "not of the form MAJOR.MINOR", f"write e.g. {option} 9.0")
    return int(major), int(minor)


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
