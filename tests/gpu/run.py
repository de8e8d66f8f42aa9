"""What only a GPU can show, in one command: ``python tests/gpu/run.py [--json OUT] [--only WORD] [--budget SECONDS]``.

Needs torch; wants a Hopper GPU, Triton, TransformerEngine, vLLM and transformers, and each part that lacks one of them
is skipped with that reason, never the whole. The package need not be installed. Prints a table, writes JSON, and exits
with 1 if a part failed. At most five minutes on one H200: after the budget (default 280 s) the remaining parts are
skipped.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import checks
import common
import models
import part_exact
import part_experts
import speed

PARTS = {
    "machine": checks.machine,
    "triton quantiser": checks.triton_quantizer,
    "numerics on the GPU": checks.numerics_on_gpu,
    "scaled_mm products": checks.gemm_error,
    "torch backend": checks.torch_backend,
    "te codes": checks.te_codes,
    "te backend": checks.te_backend,
    "vllm codes": checks.vllm_codes,
    "vllm product": checks.vllm_product,
    **part_experts.PARTS,
    "fsdp2 and recomputation": models.fsdp2,
    "linear speed": speed.linear_speed,
    "quantiser speed": speed.quantizer_speed,
    "ais": speed.ais,
    "model log-probs": models.model_log_probs,
    "batch sizes": checks.batch_sizes,
    **part_exact.PARTS,
}


def run(name: str, part, left: float) -> dict:
    """One part: its status (ok, skip or fail), what it found, and how long it took."""
    start = time.perf_counter()
    if left <= 0:
        return {"part": name, "status": "skip", "detail": "the time budget is used up", "seconds": 0.0, "values": {}}
    values: dict = {}
    try:
        part(values)
        status, detail = "ok", (part.__doc__ or "").splitlines()[0].rstrip(".")
    except common.Skip as reason:
        status, detail = "skip", str(reason)
    except Exception as error:
        status, detail = "fail", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        values["traceback"] = traceback.format_exc()
    common.release()
    return {"part": name, "status": status, "detail": detail, "seconds": time.perf_counter() - start, "values": values}


def show(result: dict) -> None:
    """A line for the part, and one for each value."""
    print(f"{result['status']:4}  {result['part']:<26} {result['seconds']:6.1f} s  {result['detail']}", flush=True)
    for name, value in result["values"].items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"          {name}: {shown}" if name != "traceback" else value, flush=True)


def main() -> int:
    """Run the parts in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--only", default="", help="run only the parts whose name contains this")
    parser.add_argument("--budget", type=float, default=280.0, help="seconds after which no further part starts")
    args = parser.parse_args()
    start, results = time.perf_counter(), []
    for name, part in PARTS.items():
        if args.only not in name:
            continue
        results.append(run(name, part, start + args.budget - time.perf_counter()))
        show(results[-1])
        if args.json:  # after each part: a killed run still leaves what it had
            args.json.write_text(
                json.dumps({"seconds": time.perf_counter() - start, "parts": results}, indent=1, default=str)
            )
    counts = {status: sum(r["status"] == status for r in results) for status in ("ok", "skip", "fail")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()), f"in {time.perf_counter() - start:.0f} s")
    return 1 if counts["fail"] or not results else 0


if __name__ == "__main__":
    sys.exit(main())
