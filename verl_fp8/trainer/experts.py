"""FP8 mixture-of-experts layers over transformers' fused experts modules.

transformers keeps the experts of a layer in two 3-D parameters and dispatches their forward through a registry
(transformers/integrations/moe.py). Our entry of that registry computes both projections of every expert in FP8::

    gate_up[e] = Q(x[e]) @ Q(W_gate_up[e]).T        x[e]: the tokens routed to expert e
    down[e] = Q(act(gate) * up) @ Q(W_down[e]).T
    y[token] = sum over its experts of weight * down, in float32, rounded once

The router sees the tokens before this and stays in high precision. What multiplies is the backend's grouped linear
layer: one call of :mod:`verl_fp8.numerics.quantize` or :mod:`verl_fp8.trainer.scaled_mm` an expert
(:class:`Fp8GroupedLinearFunction`), or TransformerEngine's grouped GEMM (:mod:`verl_fp8.trainer.te`). vLLM's experts on
CPU (verl_fp8.rollout.experts_cpu) share :func:`mix_experts`, so tokens are grouped, weighted and summed by one piece of
code on both sides.
"""

import copy
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from verl_fp8.errors import ConfigError
from verl_fp8.numerics.experts import mix_experts, spans
from verl_fp8.numerics.linear import Fp8LinearFunction, autocast_input
from verl_fp8.numerics.recipe import Recipe

IMPLEMENTATION = "verl_fp8"

# (x [rows, K], the rows of expert 0 first; weight [experts, N, K]; rows of each expert; recipe) -> [rows, N]
GroupedLinear = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Recipe], torch.Tensor]


def to_fp8(experts: nn.Module, recipe: Recipe, linear: GroupedLinear, multiple: int = 1) -> None:
    """Let an experts module compute in FP8, in place: parameters, state-dict keys and class stay.

    Args:
        experts: one for which :func:`is_experts` holds.
        recipe: the arithmetic.
        linear: the backend's product.
        multiple: it wants the rows of each expert to be a multiple of this; they are filled up with zeros.

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
            "set fp8.recipe.weight_block to a divisor, "
            "or keep the experts in bf16: fp8.recipe.exclude=['*.mlp.experts.*']",
        )
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, fp8_experts_forward)
    # The registry is asked for the name in the module's configuration; all modules share one, and some may be excluded.
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation_internal = IMPLEMENTATION
    experts.fp8_recipe, experts.fp8_linear, experts.fp8_multiple = recipe, linear, multiple


def to_reference(experts: nn.Module, recipe: Recipe) -> None:
    """:func:`to_fp8` with the reference backend, on any device."""
    to_fp8(experts, recipe, reference_linear)


def reference_linear(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], recipe: Recipe) -> torch.Tensor:
    """The :data:`GroupedLinear` of :mod:`verl_fp8.numerics.quantize`; raises DataError for a weight with infinity or
    NaN."""
    return Fp8GroupedLinearFunction.apply(x, weight, counts, recipe, Fp8LinearFunction)


def fp8_experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """An entry of transformers' experts registry.

    Args:
        self: the experts module, after :func:`to_fp8`.
        hidden_states: [tokens, hidden].
        top_k_index: [tokens, k] int64; an index equal to the number of experts is not computed (transformers' expert
            parallelism marks other ranks' experts so).
        top_k_weights: [tokens, k].

    Returns:
        [tokens, hidden] in the input's dtype, or autocast's where that is on.
    """
    x = autocast_input(hidden_states)

    def grouped(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        sizes = [count + -count % self.fp8_multiple for count in counts]
        padded, places = rows, None
        if self.fp8_multiple > 1:
            places = _places(counts, sizes, rows.device)
            # The rows added stay zero in both projections: act(0) * 0.
            padded = rows.new_zeros((sum(sizes), rows.shape[1])).index_copy(0, places, rows[: len(places)])
        gate_up = self.fp8_linear(padded, self.gate_up_proj.to(x.dtype), sizes, self.fp8_recipe)
        y = self.fp8_linear(self._apply_gate(gate_up), self.down_proj.to(x.dtype), sizes, self.fp8_recipe)
        if places is None:
            return y
        return nn.functional.pad(y.index_select(0, places), (0, 0, 0, len(rows) - len(places)))

    return mix_experts(x, top_k_index, top_k_weights, self.num_experts, grouped)


def _places(counts: Sequence[int], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where each row goes once expert i's ``counts[i]`` rows take ``sizes[i]``."""
    gaps = [0, *itertools.accumulate(size - count for size, count in zip(sizes, counts, strict=True))][:-1]
    before, repeats = torch.tensor([gaps, list(counts)], device=device)
    total = sum(counts)
    return torch.arange(total, device=device) + torch.repeat_interleave(before, repeats, output_size=total)


class Fp8GroupedLinearFunction(torch.autograd.Function):
    """One FP8 linear layer an expert. ``apply(x, weight, counts, recipe, layer)``.

    x: [rows, K], the rows of expert 0 first; weight: [experts, N, K] in x's dtype; counts: rows of each expert, which
    may be fewer than x has; y: [rows, N], zeros in the rest. Forward and backward of each expert are those of
    ``layer``, an autograd function of (x, weight, recipe) that saves the weight first
    (:class:`~verl_fp8.numerics.linear.Fp8LinearFunction`), to the bit; experts without rows get a gradient of zero. The
    weight is saved whole and its gradient written into one [experts, N, K] tensor: autograd over slices would hold a
    second one.
    """

    @staticmethod
    def forward(ctx, x, weight, counts, recipe, layer):
        y = x.new_zeros(x.shape[0], weight.shape[1])
        ctx.layer, ctx.parts, saved = layer, [], []
        for expert, rows in spans(counts):
            part = _Context(ctx.needs_input_grad[:3])
            y[rows] = layer.forward(part, x[rows], weight[expert], recipe)
            saved += part.take()
            ctx.parts.append((expert, rows, part))
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *saved)
        ctx.shapes = x.shape, weight.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        weight, *saved = ctx.saved_tensors
        saved = iter(saved)
        dx = dy.new_zeros(ctx.shapes[0]) if ctx.needs_input_grad[0] else None
        dw = dy.new_zeros(ctx.shapes[1]) if ctx.needs_input_grad[1] else None
        for expert, rows, part in ctx.parts:
            part.saved_tensors = (None if weight is None else weight[expert], *itertools.islice(saved, part.saved))
            part_dx, part_dw, *_ = ctx.layer.backward(part, dy[rows])
            del part.saved_tensors
            if dx is not None:
                dx[rows] = part_dx
            if dw is not None:
                dw[expert] = part_dw
        return dx, dw, None, None, None


class _Context:
    """What an autograd function asks of its context, for one expert."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, weight, *tensors) -> None:
        self._tensors = tensors

    def take(self) -> tuple[torch.Tensor | None, ...]:
        """What the layer saved beside the weight, no longer held here."""
        tensors, self.saved = self._tensors, len(self._tensors)
        del self._tensors
        return tensors
