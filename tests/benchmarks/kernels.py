"""The parts that need no other process than a short one: arithmetic, bytes, import time, growth with size."""

import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

os.environ["VERL_DISABLE_TRITON_FP8"] = "1"

import torch
from measure import Result, in_turns, peak_bytes, ratio, slope

from verl_fp8.correction.ais import ais_weights
from verl_fp8.numerics.quantize import quantize
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.sync.stream import SyncStats, outgoing

ROOT = Path(__file__).parents[2]


def _batch(rows: int, length: int) -> tuple[torch.Tensor, ...]:
    """(trainer's and rollout's log-probs, GRPO advantages, response mask) with answers of a quarter of the length and
    more."""
    torch.manual_seed(0)
    mask = torch.arange(length)[None] < torch.randint(length // 4, length + 1, (rows, 1))
    rollout = -3 * torch.rand(rows, length)
    train = rollout + 0.02 * torch.randn(rows, length)
    return train, rollout, torch.randn(rows, 1) * mask, mask


def ais() -> list[Result]:
    """AIS on one batch against verl's truncated importance sampling, on two threads."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as verls

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    train, rollout, advantages, mask = _batch(512, 4096)
    weights = mask.float()

    def theirs():
        return verls(train, rollout, weights, rollout_is="token", rollout_is_threshold=5.0)

    # The stage hands over booleans.
    value, figures = ratio(lambda: ais_weights(train, rollout, advantages, mask), theirs)
    peak = peak_bytes(lambda: ais_weights(train, rollout, advantages, mask)) / train.nbytes
    torch.set_num_threads(threads)
    work = "AIS, 512x4096 tokens, 2 threads"
    return [
        Result(work, "verl, rollout_is=token", value, target=0.12, figures=figures),
        Result(work + ": peak extra memory", "one input tensor", peak, target=2.0),
    ]


def weights() -> list[Result]:
    """The weight quantiser against verl's torch fallback."""
    from verl.utils.kernel.fp8_kernel import scaled_fp8_blockwise

    x = torch.randn(4096, 4096, dtype=torch.bfloat16)
    value, figures = ratio(lambda: quantize(x, (128, 128)), lambda: scaled_fp8_blockwise(x, [128, 128]))
    return [Result("weights, 4096x4096 bf16, 128x128", "verl's torch fallback", value, target=0.33, figures=figures)]


def _activations(rows: int, columns: int, **kwargs) -> tuple[float, dict]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    x = torch.randn(rows, columns, dtype=torch.bfloat16)
    with set_current_vllm_config(VllmConfig()):
        native = QuantFP8(static=False, group_shape=GroupShape(1, 128))
        return ratio(lambda: quantize(x, (1, 128), check_finite=False), lambda: native.forward_native(x), **kwargs)


def activations() -> list[Result]:
    """The activation quantiser against vLLM's."""
    value, figures = _activations(4096, 4096)
    return [
        Result(
            "activations, 4096x4096 bf16, 1x128", "vLLM's native group quantiser", value, target=0.5, figures=figures
        )
    ]


def decode() -> list[Result]:
    """The same at the sizes of decoding."""
    found = []
    for rows in (1, 8, 32, 128, 512):
        value, figures = _activations(rows, 4096, repeats=60)
        found.append(
            Result(f"activations, {rows}x4096 bf16, 1x128", "vLLM's native group quantiser", value, figures=figures)
        )
    return found


def _layers(count: int) -> tuple[list[tuple[str, torch.Tensor]], list[str]]:
    """SmolLM2's layer shapes as fp32 masters, ``count`` layers, made as they are asked for."""
    shapes = {"q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576),
              "gate_proj": (1536, 576), "up_proj": (1536, 576), "down_proj": (576, 1536)}  # fmt: skip
    names = {f"model.layers.{i}.{leaf}": shape for i in range(count) for leaf, shape in shapes.items()}
    return ((f"{name}.weight", torch.randn(shape)) for name, shape in names.items()), list(names)


def sync_bytes() -> list[Result]:
    """Bytes a weight over the transport, SmolLM2's shapes."""
    found = []
    for block in (128, 64):
        settings = Fp8Settings.parse({"mode": "unified", "recipe": {"weight_block": [block, block]}})
        weights, layers = _layers(2)
        stats = SyncStats()
        for _ in outgoing(weights, settings, layers, stats=stats):
            pass
        found.append(
            Result(
                f"bytes a weight in the sync, {block}x{block}",
                "stock verl: 4 (fp32 masters), 2 (bf16)",
                stats.bytes_per_weight,
                "bytes",
                1.03,
            )
        )
    return found


def sync_memory() -> list[Result]:
    """The most the stream's maker holds at once, for models of more and more layers."""
    settings = Fp8Settings.parse({"mode": "unified", "recipe": {"weight_block": [64, 64]}})
    largest = 1536 * 576 * 4

    def drain(count: int) -> None:
        weights, layers = _layers(count)
        for _ in outgoing(weights, settings, layers):
            pass

    peaks = {count: peak_bytes(lambda count=count: drain(count)) for count in (2, 8, 32)}
    detail = (
        ", ".join(f"{count} layers {peak / largest:.2f}" for count, peak in peaks.items())
        + " x the largest fp32 weight"
    )
    return [
        Result(
            "memory of the sync's sender, 32 layers",
            "2 layers",
            peaks[32] / peaks[2],
            target=1.05,
            detail=detail,
            figures=peaks,
        )
    ]


def gather() -> list[Result]:
    """Bytes gathered for a sync by two FSDP2 workers, and whether a single bit differs
    (tests/sync/gather_checks.py)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "tests/trainer"), str(ROOT))),
    }
    script = [sys.executable, str(ROOT / "tests/sync/gather_checks.py")]
    ranks = [
        subprocess.Popen(script, env={**env, "RANK": r}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for r in "01"
    ]
    found = json.loads([process.communicate(timeout=300)[0] for process in ranks][0].splitlines()[-1])
    streams = [differences for name, differences in found.items() if name.startswith("stream_")]
    counts = {block: found[f"bytes_gathered {block}"] for block in (128, 64)}
    return [
        Result(
            f"bytes gathered, 2 FSDP workers, {block}x{block}", "gather fp32 masters, then quantise",
            counted["ours"] / counted["stock"], target=0.26, figures=counted,
            detail=f"{sum(map(len, streams))} of the tensors of {len(streams)} cases differ in a bit",
        )
        for block, counted in counts.items()
    ]  # fmt: skip


_PLUGIN = """
import gc, time, verl
from importlib.metadata import entry_points
gc.disable()
start = time.perf_counter()
for point in entry_points(group="verl.plugins"):
    point.load()
print(time.perf_counter() - start)
"""


def import_time() -> list[Result]:
    """What loading our entry point adds to ``import verl``, as verl loads it, in fresh processes.

    The difference of two whole imports, five seconds each here, drowns in noise. Without garbage collection, whose turn
    depends on everything that was loaded before.
    """
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_PLATFORM": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _PLUGIN]
    times = [
        float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()[-1]) * 1e3
        for _ in range(7)
    ]
    return [
        Result(
            "import verl with the package", "without it", statistics.median(times), "ms more", 50, figures={"ms": times}
        )
    ]


def growth() -> list[Result]:
    """Time over 2^16 to 2^24 elements; an exponent of 1 is linear. The smallest sizes are mostly calls, hence the upper
    half too."""
    sizes = [1 << e for e in range(16, 25)]
    found = []
    for work in ("AIS", "weights 128x128", "activations 1x128"):
        times = []
        for size in sizes:
            if work == "AIS":
                batch = _batch(max(size >> 12, 1), 4096 if size >= 4096 else size)

                def call(batch=batch):
                    return ais_weights(*batch)
            else:
                x = torch.randn(size >> 12, 4096, dtype=torch.bfloat16)
                block, check = ((128, 128), True) if work.startswith("w") else ((1, 128), False)

                def call(x=x, block=block, check=check):
                    return quantize(x, block, check_finite=check)

            times.append(statistics.median(in_turns(call, repeats=7)[0]))
        upper = slope(sizes[4:], times[4:])
        found.append(
            Result(
                f"{work}: growth from 2^20 to 2^24 elements", "linear, exponent 1", upper, "exponent", 1.1,
                detail=f"from 2^16: {slope(sizes, times):.2f}; {times[-1] / sizes[-1] * 1e9:.2f} ns an element at 2^24",
                figures={"sizes": sizes, "seconds": times},
            )
        )  # fmt: skip
    return found


def plot(results: list[Result], path: Path) -> None:
    """Time over size on logarithmic axes, with the fitted lines."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for result in results:
        figure.add_scatter(
            x=result.figures["sizes"],
            y=result.figures["seconds"],
            mode="lines+markers",
            name=f"{result.work} ({result.value:.2f})",
        )
    figure.update_xaxes(type="log", title="elements")
    figure.update_yaxes(type="log", title="seconds")
    figure.write_html(path, include_plotlyjs=True)
