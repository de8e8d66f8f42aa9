"""What the parts of tests/gpu/run.py share: where they run, their inputs, how two results are compared and timed.

Bits are compared with verl_fp8.numerics.quantize on the CPU, which the unit tests hold to TransformerEngine's own
reference.
"""

import gc
import importlib.util
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics.quantize import QuantizedTensor
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer.convert import convert_linears

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GOLDEN = Path(__file__).parents[1] / "golden" / "te_blockwise_golden.npz"
FORMATS = ("fp32", "pow2")


class Skip(Exception):
    """Why a part cannot run here."""


def release() -> None:
    """Give the GPU's memory back between parts."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def need_gpu(*, hopper: bool = False) -> None:
    """Skip without a GPU, or without a Hopper one."""
    if not GPU:
        raise Skip("no CUDA GPU")
    major = torch.cuda.get_device_capability()[0]
    if hopper and major != 9:
        raise Skip(f"compute capability {major}.x; torch's blockwise scaled_mm is for 9.x")
    if major < 9:
        raise Skip(f"compute capability {major}.x has no blockwise FP8")


def need(module: str) -> None:
    """Skip without a module."""
    if importlib.util.find_spec(module) is None:
        raise Skip(f"{module} is not installed")


def backends() -> list[str]:
    """The trainer's backends that run here."""
    found = ["reference"]
    if GPU and torch.cuda.get_device_capability()[0] == 9:
        found.append("torch")
    if GPU and importlib.util.find_spec("transformer_engine"):
        found.append("te")
    return found


def formats() -> tuple[str, ...]:
    """The scale formats this GPU computes with."""
    return FORMATS if not GPU or torch.cuda.get_device_capability()[0] < 10 else ("pow2",)


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """bf16 normal values, the same on every machine."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.bfloat16().to(DEVICE)


def outliers(*shape: int, seed: int = 0) -> torch.Tensor:
    """bf16 values whose magnitude differs by up to 2^40 between rows and columns, with zeros, subnormals, infinity and
    NaN."""
    x = randn(*shape, seed=seed).cpu().float()
    generator = torch.Generator().manual_seed(seed + 1)
    x *= torch.exp2(torch.randint(-20, 20, (shape[0], 1), generator=generator).float())
    x *= torch.exp2(torch.randint(-10, 10, (1, shape[1]), generator=generator).float())
    x[::7, ::3] = 0.0
    x[1::5] *= 2.0**-120
    x[3, :130], x[5, 10], x[7, 20], x[9, 30] = 0.0, float("inf"), float("nan"), float("-inf")
    return x.bfloat16().to(DEVICE)


def differing(found: QuantizedTensor, expected: QuantizedTensor) -> tuple[int, int]:
    """(codes that differ, scales that differ)."""
    codes = (found.data.cpu().view(torch.uint8) != expected.data.cpu().view(torch.uint8)).sum()
    scales = (
        found.scale_inv.cpu().contiguous().view(torch.int32) != expected.scale_inv.cpu().contiguous().view(torch.int32)
    ).sum()
    return int(codes), int(scales)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, Frobenius norms in float64."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def milliseconds(step, repeats: int = 20) -> float:
    """Median time of one call on the GPU."""
    for _ in range(5):
        step()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times))


def layer(backend: str, recipe: Recipe, bias: bool = True) -> nn.Module:
    """Two linear layers and an activation, converted; the same weights for every backend."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1024, 3072, bias=bias), nn.SiLU(), nn.Linear(3072, 1024, bias=bias))
    module = module.to(DEVICE, torch.bfloat16)
    convert_linears(module, recipe, LayerFilter(), backend)
    return module


def gradients(module: nn.Module, x: torch.Tensor, recompute: bool = False) -> list[torch.Tensor]:
    """Output, and the gradients of input and parameters."""
    from torch.utils.checkpoint import checkpoint

    x = x.clone().requires_grad_()
    y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]
