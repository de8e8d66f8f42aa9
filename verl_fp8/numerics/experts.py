"""Mixture of experts between the router and the sum: how tokens are grouped, weighted and added on both sides."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.function import once_differentiable


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


def spans(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
