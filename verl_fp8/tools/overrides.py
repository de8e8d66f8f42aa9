"""From a command line of overrides to a composed and judged configuration; what every command starts with."""

import contextlib
import io
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_fp8.errors import ConfigError, Fp8Error
from verl_fp8.switches.hardware import Hardware
from verl_fp8.upstream import pins

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

    from verl_fp8.rules.run import validate_run

    # First, for a group that Hydra took as a plain string: verl's own checks would stumble over what is missing then.
    # verl's validate_config asks again below and is answered from this judgement.
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
        raise ConfigError(
            " ".join(options), "no --capability beside it", "give --capability 9.0 (Hopper) or 10.0 (Blackwell)"
        )
    te = options.get("--transformer-engine", pins.TRANSFORMER_ENGINE)
    megatron = options.get("--megatron-core", "0.19.2")
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


def take_output_options(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Take ``--json FILE`` and ``--html FILE`` out of verl's overrides: ({"json": file, "html": file}, the rest).

    Raises:
        SystemExit: an option without a value.
    """
    found, rest, pending = {}, [], list(arguments)
    while pending:
        argument = pending.pop(0)
        name, given, value = argument.partition("=")
        if name not in ("--json", "--html"):
            rest.append(argument)
            continue
        if not given and not pending:
            print(f"{name} needs a file", file=sys.stderr)
            raise SystemExit(2)
        found[name[2:]] = value if given else pending.pop(0)
    return found, rest


def write_outputs(outputs: dict[str, str], found: dict[str, Any], page) -> None:
    """Write the files that were asked for: ``found`` as JSON, ``page(found)`` as HTML."""
    if "json" in outputs:
        Path(outputs["json"]).write_text(json.dumps(found, indent=1) + "\n")
    if "html" in outputs:
        Path(outputs["html"]).write_text(page(found))
    for kind, file in outputs.items():
        print(f"{kind} written to {file}")
