"""Command line ``verl-fp8`` (also ``python -m verl_fp8``)."""

import argparse
import sys

from verl_fp8 import __version__


def main(argv: list[str] | None = None) -> int:
    """Dispatch one command; returns the exit code (0 fine, 2 refused or wrong use)."""
    parser = argparse.ArgumentParser(
        prog="verl-fp8", description="Unified FP8 and adaptive importance sampling for verl."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="compose and validate a verl command line exactly as the run would",
        description="Give it everything that follows `python -m verl.trainer.main_ppo`.",
        add_help=False,
    )
    check.add_argument("overrides", nargs=argparse.REMAINDER)
    explain = commands.add_parser(
        "explain", help="the raw verl, vLLM and TransformerEngine settings that the switches expand to", add_help=False
    )
    explain.add_argument("overrides", nargs=argparse.REMAINDER)
    certify = commands.add_parser(
        "certify",
        help="how far apart trainer and rollout will be, and why: [--json OUT] [--html OUT] <verl overrides>",
        add_help=False,
    )
    certify.add_argument("overrides", nargs=argparse.REMAINDER)
    attribute = commands.add_parser(
        "attribute",
        help="which operation makes two forwards differ, and where: [--json OUT] [--html OUT] <verl overrides>",
        add_help=False,
    )
    attribute.add_argument("overrides", nargs=argparse.REMAINDER)
    doctor = commands.add_parser(
        "doctor", help="what this machine, or every node of a Ray cluster, lacks for FP8 training"
    )
    doctor.add_argument(
        "--ray", metavar="ADDRESS", help="look on every node of this cluster too, e.g. auto or 10.0.0.1:6379"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of tables")
    replay = commands.add_parser("replay", help="what each correction would have done to a run's own log-probs")
    replay.add_argument("dump", help="the folder that is_correction.dump named")
    replay.add_argument("--set", action="append", default=[], metavar="METHOD.KEY=VALUE", help="e.g. --set tis.clip=3")
    replay.add_argument("--json", metavar="OUT", help="write all figures as JSON")
    replay.add_argument("--html", metavar="OUT", help="write a self-contained page")
    report = commands.add_parser(
        "report", help="table and plots of one or more runs from verl's file log or TensorBoard"
    )
    report.add_argument("runs", nargs="+", help="folders or log files of runs")
    report.add_argument("--json", action="store_true", help="print JSON instead of a table")
    report.add_argument("--html", metavar="OUT", help="write a self-contained page")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    if argv[0] in commands.choices and {"-h", "--help"} & set(argv[1:]):
        commands.choices[argv[0]].print_help()
        return 0
    # argparse would take verl's own --config-dir for an option of ours.
    if argv[:1] == ["check"]:
        from verl_fp8.tools.check import check_command

        return check_command(argv[1:])
    if argv[:1] == ["explain"]:
        from verl_fp8.tools.explain import explain_command

        return explain_command(argv[1:])
    if argv[:1] == ["certify"]:
        from verl_fp8.tools.mismatch.certify import certify_command

        return certify_command(argv[1:])
    if argv[:1] == ["attribute"]:
        from verl_fp8.tools.mismatch.attribute import attribute_command

        return attribute_command(argv[1:])
    args = parser.parse_args(argv)
    if args.command == "doctor":
        from verl_fp8.tools.doctor.command import doctor_command

        return doctor_command(args.ray, as_json=args.json)
    if args.command == "replay":
        from verl_fp8.tools.runs.replay import replay_command

        return replay_command(args.dump, overrides=args.set, json_path=args.json, html_path=args.html)
    from verl_fp8.tools.runs.report import report_command

    return report_command(args.runs, as_json=args.json, html_path=args.html)


if __name__ == "__main__":
    sys.exit(main())
