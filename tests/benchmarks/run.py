"""The package's cost, as ratios measured in one run: a table, and JSON with every figure behind it.

    python tests/benchmarks/run.py [PART ...] [--json FILE] [--html FILE] [--list]

Each part times the package and what it is compared with in turns and takes the ratio of the medians, so that a
machine's other load falls on both. Absolute times do not carry over from machine to machine. Without names the parts of
``kernels.py`` run (two minutes); those of ``processes.py``, which start vLLM, trainers and whole runs on SmolLM2, must
be named or asked for by ``--all``.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("VERL_PLATFORM", "cpu")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import kernels
import processes
import torch
from measure import Result
from rich.console import Console
from rich.table import Table

QUICK: dict[str, Callable[[], list[Result]]] = {
    "ais": kernels.ais,
    "weights": kernels.weights,
    "activations": kernels.activations,
    "decode": kernels.decode,
    "bytes": kernels.sync_bytes,
    "gather": kernels.gather,
    "memory": kernels.sync_memory,
    "import": kernels.import_time,
    "growth": kernels.growth,
}
LONG: dict[str, Callable[[], list[Result]]] = {
    "rollout": processes.rollout,
    "trainer": processes.trainer,
    "sync": processes.sync,
    "step": processes.step,
}


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join({**QUICK, **LONG}))
    parser.add_argument("--all", action="store_true", help="the long parts too")
    parser.add_argument("--list", action="store_true", help="names of the parts")
    parser.add_argument("--json", type=Path, help="where to write every figure")
    parser.add_argument("--html", type=Path, help="where to plot the growth")
    args = parser.parse_args()
    parts = {**QUICK, **LONG}
    if args.list:
        print(*parts, sep="\n")
        return
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no part {sorted(unknown)[0]}; there are {', '.join(parts)}")
    names = args.parts or list(parts if args.all else QUICK)
    found: dict[str, list[Result]] = {}
    table = Table("work", "against", "measured", "target", "", "detail")
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = parts[name]()
        for result in found[name]:
            table.add_row(result.work, result.against, result.shown(), result.goal(), result.verdict(), result.detail)
    here = machine()
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(
        f"{here['cpu']}, {here['cores']} cores, {here['threads']} threads, load {here['load']:.1f}, "
        f"torch {here['torch']}"
    )
    console.print(table)
    if args.json:
        args.json.write_text(
            json.dumps({"machine": here, **{n: [asdict(r) for r in rs] for n, rs in found.items()}}, indent=1) + "\n"
        )
    if args.html and "growth" in found:
        kernels.plot(found["growth"], args.html)


if __name__ == "__main__":
    main()
