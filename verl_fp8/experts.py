"""FP8 mixture-of-experts layers over transformers' fused experts modules.

transformers keeps the experts of a layer in two 3-D parameters and dispatches their forward through a registry
(transformers/integrations/moe.py). An entry of that registry computes both projections of every expert by
:mod:`verl_fp8.numerics`, expert by expert::

    gate_up[e] = Q(x[e]) @ Q(W_gate_up[e]).T        x[e]: the tokens routed to expert e
    down[e] = Q(act(gate) * up) @ Q(W_down[e]).T
    y[token] = sum over its experts of weight * down, in float32, rounded once

The router sees the tokens before this and stays in high precision. The vLLM side (verl_fp8.vllm_moe_cpu) shares
:func:`mix_experts`, so tokens are grouped, weighted and summed by one piece of code on both sides.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from verl_fp8.errors import ConfigError
from verl_fp8.numerics import Fp8LinearFunction
from verl_fp8.recipe import Recipe

IMPLEMENTATION = "verl_fp8_reference"
FUSED = ("gate_up_proj", "down_proj")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer in 3-D parameters ``gate_up_proj`` and ``down_proj``."""
    return all(isinstance(p := module._parameters.get(name), nn.Parameter) and p.ndim == 3 for name in FUSED)


def expert_shapes(name: str, module: nn.Module) -> dict[str, tuple[int, int]]:
    """``<name>.<expert>.gate_proj`` and so on -> (out, in): the checkpoint's names, which verl's sync streams
    (verl/workers/engine/fsdp/utils.py, unfuse_moe_params) and vLLM loads.

    Raises:
        ConfigError: another layout than a gated [experts, out, in], gate before up, without bias, at ``*.mlp.experts``.
    """
    expected = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    different = [f"{key}={found}" for key, value in expected.items() if (found := getattr(module, key, None)) is not value]
    if different or not f".{name}".endswith(".mlp.experts"):
        raise ConfigError(
            "FP8 experts (+fp8)",
            f"{type(module).__name__} at {name}{f' with ' + ', '.join(different) if different else ''}",
            "use a model with gated, bias-free experts at *.mlp.experts (Qwen3-MoE's layout), or remove +fp8",
        )
    experts, double, hidden = module.gate_up_proj.shape
    width = module.down_proj.shape[2]
    if module.down_proj.shape != (experts, hidden, double // 2):
        raise ConfigError(
            "FP8 experts (+fp8)",
            f"{name} with gate_up_proj {tuple(module.gate_up_proj.shape)} and down_proj {tuple(module.down_proj.shape)}",
            "use a model whose experts have one width, or remove +fp8",
        )
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return {f"{name}.{e}.{leaf}": shapes[leaf] for e in range(experts) for leaf in PROJECTIONS}


def to_reference(experts: nn.Module, recipe: Recipe) -> None:
    """Let an experts module compute in FP8, in place: parameters, state-dict keys and class stay.

    Raises:
        ConfigError: the experts' width is no multiple of the block's rows.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    width, rows = experts.down_proj.shape[2], recipe.weight_block[0]
    if width % rows:
        # gate and up are quantised apart in the sync and in vLLM; a block here would reach over both.
        raise ConfigError(
            f"FP8 experts in blocks of {recipe.weight_block[0]}x{recipe.weight_block[1]}",
            f"an intermediate size of {width}, no multiple of {rows}",
            "set fp8.recipe.weight_block to a divisor, or keep the experts in bf16: fp8.recipe.exclude=['*.mlp.experts.*']",
        )
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, fp8_experts_forward)
    # The registry is asked for the name in the module's configuration; all modules share one, and some may be excluded.
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation_internal = IMPLEMENTATION
    experts.fp8_recipe = recipe


def fp8_experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """An entry of transformers' experts registry.

    Args:
        self: the experts module, with ``fp8_recipe``.
        hidden_states: [tokens, hidden].
        top_k_index: [tokens, k] int64; an index equal to the number of experts is not computed (transformers' expert
            parallelism marks other ranks' experts so).
        top_k_weights: [tokens, k].

    Returns:
        [tokens, hidden] in the input's dtype, or autocast's where that is on.

    Raises:
        DataError: an expert's weight holds infinity or NaN.
    """
    x = hidden_states
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        # As in linear.ReferenceFp8Linear.
        x = x.to(torch.get_autocast_dtype(kind))

    def grouped(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        gate_up = Fp8GroupedLinearFunction.apply(rows, self.gate_up_proj.to(x.dtype), counts, self.fp8_recipe)
        return Fp8GroupedLinearFunction.apply(self._apply_gate(gate_up), self.down_proj.to(x.dtype), counts, self.fp8_recipe)

    return mix_experts(x, top_k_index, top_k_weights, self.num_experts, grouped)


def mix_experts(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    num_experts: int,
    grouped: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
) -> torch.Tensor:
    """Group tokens by expert, let ``grouped`` compute, weigh and sum.

    Args:
        x: [tokens, hidden].
        top_k_index: [tokens, k] integers; ``num_experts`` and above: no expert.
        top_k_weights: [tokens, k]; rounded to x's dtype, as transformers' routers do.
        num_experts: number of experts.
        grouped: ([tokens * k, hidden] sorted by expert, tokens of each expert) -> [tokens * k, hidden], zeros in rows
            past the last expert's.

    Returns:
        [tokens, hidden] in x's dtype: products in that dtype, summed in float32 in the order of k, rounded once.
    """
    tokens, k = top_k_index.shape
    ids = top_k_index.reshape(-1).long().clamp(max=num_experts)
    order = torch.argsort(ids, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.bincount(ids, minlength=num_experts)[:num_experts].tolist()
    y = grouped(_Dispatch.apply(x, order, inverse, k), counts)
    y = y[inverse].view(tokens, k, y.shape[-1]) * top_k_weights.to(y.dtype).unsqueeze(-1)
    return _sum_k(y)


def _sum_k(parts: torch.Tensor) -> torch.Tensor:
    """[tokens, k, hidden] -> [tokens, hidden]: one order of summation whatever the number of tokens."""
    total = parts[:, 0].float()
    for j in range(1, parts.shape[1]):
        total = total + parts[:, j].float()
    return total.to(parts.dtype)


class _Dispatch(torch.autograd.Function):
    """x[order // k]; the backward sums a token's k gradients in float32 and in order (a scatter-add would not)."""

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (inverse,) = ctx.saved_tensors
        return _sum_k(dy[inverse].view(-1, ctx.k, dy.shape[-1])), None, None, None


class Fp8GroupedLinearFunction(torch.autograd.Function):
    """One FP8 linear layer an expert. ``apply(x, weight, counts, recipe)``.

    x: [rows, K], the rows of expert 0 first; weight: [experts, N, K] in x's dtype; counts: rows of each expert, which may
    be fewer than x has; y: [rows, N], zeros in the rest. Forward and backward of each expert are
    :class:`~verl_fp8.numerics.Fp8LinearFunction`'s, to the bit; experts without rows get a gradient of zero. The weight
    gradient is written into one [experts, N, K] tensor: autograd over slices would hold a second one.
    """

    @staticmethod
    def forward(ctx, x, weight, counts, recipe):
        y = x.new_zeros(x.shape[0], weight.shape[1])
        saved = []
        for expert, rows in _spans(counts):
            part = _Context(ctx.needs_input_grad[:2], saved)
            y[rows] = Fp8LinearFunction.forward(part, x[rows], weight[expert], recipe)
        ctx.counts, ctx.recipe = counts, recipe
        operand = scale_inv = None
        if ctx.needs_input_grad[1]:
            if recipe.backward == "dequantized":
                columns = -(-x.shape[1] // recipe.activation_block[1])
                operand = torch.cat([s[0].view(torch.uint8) for s in saved] or [x.new_zeros(0, x.shape[1], dtype=torch.uint8)])
                scale_inv = torch.cat([s[1] for s in saved] or [x.new_zeros(0, columns, dtype=torch.float32)])
                operand = operand.view(torch.float8_e4m3fn)
            else:
                operand = x
        ctx.save_for_backward(operand, scale_inv, weight if ctx.needs_input_grad[0] else None)
        ctx.shapes = x.shape, weight.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        operand, scale_inv, weight = ctx.saved_tensors
        dx = None if weight is None else dy.new_zeros(ctx.shapes[0])
        dw = None if operand is None else dy.new_zeros(ctx.shapes[1])
        for expert, rows in _spans(ctx.counts):
            part = SimpleNamespace(
                recipe=ctx.recipe,
                saved_tensors=(
                    None if operand is None else operand[rows],
                    None if scale_inv is None else scale_inv[rows],
                    None if weight is None else weight[expert],
                ),
            )
            part_dx, part_dw, *_ = Fp8LinearFunction.backward(part, dy[rows])
            if dx is not None:
                dx[rows] = part_dx
            if dw is not None:
                dw[expert] = part_dw
        return dx, dw, None, None


class _Context:
    """What Fp8LinearFunction's forward asks of autograd's context, for one expert."""

    def __init__(self, needs_input_grad: tuple[bool, bool], saved: list) -> None:
        self.needs_input_grad = needs_input_grad
        self._saved = saved

    def save_for_backward(self, *tensors) -> None:
        self._saved.append(tensors)


def _spans(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
