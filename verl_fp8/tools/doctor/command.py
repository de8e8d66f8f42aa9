"""``verl-fp8 doctor [--ray ADDRESS] [--json]``: what a machine, or every node of a Ray cluster, lacks for an FP8 run.

:mod:`verl_fp8.tools.doctor.facts` gathers the facts in a process of its own: here, and with an address in a Ray worker
of every node, started as a run's own workers are. :mod:`verl_fp8.tools.doctor.diagnosis` judges them. All this needs
the standard library alone: a broken package, or a missing one, is a finding like any other.
"""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_fp8.sync.segments import SEGMENTS
from verl_fp8.tools.doctor.diagnosis import FAIL, OK, WARN, Finding, judge
from verl_fp8.tools.doctor.nodes import ask_nodes, differences_between_nodes
from verl_fp8.tools.doctor.remote import gather

# Importing everything takes about 30 s on an idle machine, minutes on a busy one.
TIMEOUT = 600


def source() -> str:
    """The source of :mod:`verl_fp8.tools.doctor.facts`, which is sent to the nodes."""
    return Path(__file__).with_name("facts.py").read_text()


def gather_here(*sections: str, timeout: float = TIMEOUT) -> dict[str, Any]:
    """The facts of this machine: section -> what was found; all sections if none is named."""
    return gather(source(), SEGMENTS.pattern, sections, timeout=timeout)


def examine(address: str | None) -> tuple[list[Finding], dict[str, dict[str, Any]]]:
    """All findings, and the facts by place: ``here`` and, with an address, the nodes of that Ray cluster."""
    here = gather_here()
    findings, places = list(judge(here)), {"here": here}
    if address is None:
        return findings, places
    if importlib.util.find_spec("ray") is None:
        found = f"not installed, so {address} cannot be asked"
        return [*findings, Finding("here", "Ray", FAIL, found, "pip install 'ray[default]'")], places
    try:
        nodes = ask_nodes(address, source(), SEGMENTS.pattern, TIMEOUT)
    except Exception as error:
        message = (str(error).strip().splitlines() or ["no message"])[0]
        found, fix = f"{address}: {type(error).__name__}: {message}", "ray start --head, or correct the address"
        return [*findings, Finding("here", "Ray", FAIL, found, fix)], places
    for name, facts in nodes.items():
        findings += judge(facts, name)
    return [*findings, *differences_between_nodes(here, nodes)], places | nodes


def doctor_command(address: str | None, *, as_json: bool = False) -> int:
    """Print findings; exit 0 if none of them is a failure, else 1."""
    findings, places = examine(address)
    failed = [f for f in findings if f.level == FAIL]
    symbols = places["here"].get("symbols")
    symbols = symbols if isinstance(symbols, list) else []
    if as_json:
        rows = [{"path": path, "used_by": users, "problem": problem} for path, users, problem in symbols]
        print(
            json.dumps(
                {"ok": not failed, "findings": [asdict(f) for f in findings], "symbols": rows, "facts": places},
                indent=1,
            )
        )
        return int(bool(failed))
    rows = [(path, ", ".join(users), problem or "yes") for path, users, problem in symbols]
    if rows:
        _print("Upstream symbols", ("symbol", "for", "as relied on"), rows)
    _print(
        "Findings", ("", "where", "what", "found", "do"), [(f.level, f.where, f.what, f.found, f.fix) for f in findings]
    )
    warned = sum(f.level == WARN for f in findings)
    print(f"{len(failed)} failed, {warned} warnings, {len(findings)} looked at.")
    return int(bool(failed))


def _print(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if importlib.util.find_spec("rich") is None:
        print(title)
        for row in rows:
            print("  " + " | ".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {OK: "green", WARN: "yellow", FAIL: "bold red"}
    view = Table(title=title, title_justify="left")
    for column in columns:
        view.add_column(column, overflow="fold")
    for row in rows:
        view.add_row(*(Text(cell, style=colours.get(cell, "")) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=180)).print(view)
