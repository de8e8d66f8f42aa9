"""Command line ``verl-fp8`` (also ``python -m verl_fp8``)."""

import argparse
import sys
from collections.abc import Callable

from verl_fp8 import __version__

# What follows the command's own words is verl's; verl's options (--config-dir) are not this parser's to know.
_OVERRIDES = "<verl overrides>"


def main(argv: list[str] | None = None) -> int:
    """Dispatch one command.

    Returns:
        The exit code: 0 fine, 2 refused or wrong use; certify and doctor give 1 for a failure that they found.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    arguments, overrides = parser.parse_known_args(argv)
    if overrides and not arguments.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    return arguments.run(arguments, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-fp8", description="Unified FP8 and adaptive importance sampling for verl."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    machine = "[--capability MAJOR.MINOR] "
    files = "[--json OUT] [--html OUT] "
    _add_overrides(commands, "check", _check, machine,
                   "compose and validate a verl command line exactly as the run would",
                   description="Give it everything that follows `python -m verl.trainer.main_ppo`.")  # fmt: skip
    _add_overrides(commands, "explain", _explain, f"[--shell | --json] {machine}",
                   "the raw verl, vLLM and TransformerEngine settings that the switches expand to")  # fmt: skip
    _add_overrides(commands, "certify", _certify, files,
                   f"how far apart trainer and rollout will be, and why: {files}{_OVERRIDES}")  # fmt: skip
    _add_overrides(commands, "attribute", _attribute, files,
                   f"which operation makes two forwards differ, and where: {files}{_OVERRIDES}")  # fmt: skip
    _add_doctor(commands)
    _add_replay(commands)
    _add_report(commands)
    return parser


def _add_overrides(commands, name: str, run: Callable, options: str, text: str, description: str | None = None) -> None:
    """A command that hands on every word but ``--help``, in their order: it takes its own options out itself."""
    usage = f"%(prog)s {options}{_OVERRIDES}"
    command = commands.add_parser(name, help=text, description=description or text, usage=usage, allow_abbrev=False)
    command.set_defaults(run=run, takes_overrides=True)


def _add_doctor(commands) -> None:
    command = commands.add_parser(
        "doctor", help="what this machine, or every node of a Ray cluster, lacks for FP8 training"
    )
    command.add_argument(
        "--ray", metavar="ADDRESS", help="look on every node of this cluster too, e.g. auto or 10.0.0.1:6379"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    command.set_defaults(run=_doctor, takes_overrides=False)


def _add_replay(commands) -> None:
    command = commands.add_parser("replay", help="what each correction would have done to a run's own log-probs")
    command.add_argument("dump", help="the folder that is_correction.dump named")
    command.add_argument("--set", action="append", default=[], metavar="METHOD.KEY=VALUE", help="e.g. --set tis.clip=3")
    command.add_argument("--json", metavar="OUT", help="write all figures as JSON")
    command.add_argument("--html", metavar="OUT", help="write a self-contained page")
    command.set_defaults(run=_replay, takes_overrides=False)


def _add_report(commands) -> None:
    command = commands.add_parser(
        "report", help="table and plots of one or more runs from verl's file log or TensorBoard"
    )
    command.add_argument("runs", nargs="+", help="folders or log files of runs")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.add_argument("--html", metavar="OUT", help="write a self-contained page")
    command.set_defaults(run=_report, takes_overrides=False)


# Each command imports what it needs when it runs: `verl-fp8 doctor` must work where torch and verl do not.


def _check(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from verl_fp8.tools.check import check_command

    return check_command(overrides)


def _explain(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from verl_fp8.tools.explain import explain_command

    return explain_command(overrides)


def _certify(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from verl_fp8.tools.mismatch.certify import certify_command

    return certify_command(overrides)


def _attribute(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from verl_fp8.tools.mismatch.attribute import attribute_command

    return attribute_command(overrides)


def _doctor(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from verl_fp8.tools.doctor.command import doctor_command

    return doctor_command(arguments.ray, as_json=arguments.json)


def _replay(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from verl_fp8.tools.runs.replay import replay_command

    return replay_command(arguments.dump, overrides=arguments.set, json_path=arguments.json, html_path=arguments.html)


def _report(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from verl_fp8.tools.runs.report import report_command

    return report_command(arguments.runs, as_json=arguments.json, html_path=arguments.html)


if __name__ == "__main__":
    sys.exit(main())
