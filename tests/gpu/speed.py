"""Times: the FP8 linear, the quantisers, the AIS stage."""

import importlib.util
import time

import common
import torch
from common import DEVICE, FORMATS, GPU, milliseconds, need, need_gpu, randn
from torch import nn

from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer.convert import convert_linears


def linear_speed(values: dict) -> None:
    """One 8192 x 8192 x 8192 linear layer, forward and backward, against bf16 and bare TransformerEngine."""
    need_gpu()
    size = 8192
    x, dy = randn(size, size, seed=1).requires_grad_(), randn(size, size, seed=2)
    recipe = Recipe(scale_format=common.formats()[0])
    flops = 3 * 2 * size**3

    def measured(name: str, forward, module: nn.Module) -> None:
        def step() -> None:
            x.grad = None
            module.zero_grad(set_to_none=True)
            forward(x).backward(dy)

        took = milliseconds(step)
        values[name] = f"{took:.2f} ms, {flops / took / 1e9:.0f} TFLOP/s"

    def linear(backend: str | None) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(size, size, bias=False, device=DEVICE, dtype=torch.bfloat16))
        if backend:
            convert_linears(model, recipe, LayerFilter(), backend)
        return model

    model = linear(None)
    measured("bf16 nn.Linear", model, model)
    if torch.cuda.get_device_capability()[0] == 9:
        model = linear("torch")
        measured("fp8.backend=torch", model, model)
    if importlib.util.find_spec("transformer_engine") is None:
        values["TransformerEngine"] = "skipped: not installed"
        return
    import transformer_engine.pytorch as te

    from verl_fp8.trainer.te import te_recipe

    model = linear("te")
    measured("fp8.backend=te", model, model)
    bare, theirs = te.Linear(size, size, bias=False, params_dtype=torch.bfloat16), te_recipe(recipe)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=theirs):
            return bare(x)

    measured("bare te.Linear, the same recipe", forward, bare)


def quantizer_speed(values: dict) -> None:
    """Bandwidth of the Triton quantisers against a device copy: bytes read and written a second."""
    need_gpu()
    need("triton")
    from verl_fp8.numerics import quantize_triton as tq

    x = randn(1024, 8192).repeat(32, 1)  # 512 MiB: far beyond the L2 cache
    target, elements = torch.empty_like(x), x.numel()
    copy = 4 * elements / milliseconds(lambda: target.copy_(x)) / 1e6
    values["device copy"] = f"{copy:.0f} GB/s"
    for scale_format in FORMATS:
        for name, moved, step in (
            ("1x128", 3 + 4 / 128, lambda f=scale_format: tq.quantize_rows(x, 128, scale_format=f)),
            ("1x128 and 128x1", 4 + 8 / 128, lambda f=scale_format: tq.quantize_both(x, 128, scale_format=f)),
            ("128x128", 3, lambda f=scale_format: tq.quantize_blocks(x, (128, 128), scale_format=f)),
            (
                "128x128 transposed",
                3,
                lambda f=scale_format: tq.quantize_blocks(x, (128, 128), scale_format=f, transposed=True),
            ),
        ):
            rate = moved * elements / milliseconds(step) / 1e6
            values[f"{scale_format} {name}"] = f"{rate:.0f} GB/s, {rate / copy:.0%} of the copy"


def ais(values: dict) -> None:
    """The AIS stage on this device: its weights and alpha are the CPU's, and how long it takes."""
    from verl_fp8.correction.ais import AISConfig, ais_weights

    rows, length = (1024, 4096) if GPU else (64, 256)
    generator = torch.Generator().manual_seed(11)
    rollout = -torch.rand(rows, length, generator=generator)
    train = rollout + 0.05 * torch.randn(rows, length, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, length).contiguous()
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    inputs = [t.to(DEVICE) for t in (train, rollout, advantages, mask)]
    here = ais_weights(*inputs, AISConfig())
    start = time.perf_counter()
    here = ais_weights(*inputs, AISConfig())
    values[f"milliseconds for {rows} x {length} tokens"] = 1e3 * (time.perf_counter() - start)
    host = ais_weights(train, rollout, advantages, mask, AISConfig())
    worst = float((here.weights.cpu() - host.weights).abs().max())
    values["alpha"], values["largest difference of a weight to the CPU's"] = here.alpha, worst
    # One exp in float32: a unit or two in the last place of weights up to 5.
    assert abs(here.alpha - host.alpha) < 1e-6 and worst < 2e-6
