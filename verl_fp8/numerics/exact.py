"""One definition of every operation between two roundings, for a trainer and a rollout that agree to the bit.

FP8 amplifies any difference: one flipped code in an early layer is a whole FP8 step, and thirty layers later two
"equal" models differ almost as much as FP8 differs from bf16. So the exact mode fixes the points where values are
rounded (bf16 at layer boundaries, FP8 at the linears' inputs) and computes everything between them in float64.
Different orders of summation then differ by about 1e-16 relative, which practically never reaches a rounding to bf16
(2^-8) or FP8 (2^-4).

Used by both sides: :mod:`verl_fp8.trainer.exact` swaps these into a Hugging Face model, :mod:`verl_fp8.rollout.exact`
registers them with vLLM. The backward passes use ordinary precision (:func:`with_ordinary_backward`).
"""

from collections.abc import Callable

import torch

WIDE = torch.float64
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, rounded once to x's dtype."""
    wide = x.to(WIDE)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.to(WIDE)).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), rounded once to x's dtype."""
    wide = x.to(WIDE)
    return (wide * torch.sigmoid(wide)).to(x.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate), rounded, times up, rounded: the two roundings of a Hugging Face gated MLP."""
    return silu(gate) * up


def rope_table(positions: torch.Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * base^(-2i / dim), [*positions.shape, dim / 2], rounded once to ``dtype``."""
    exponent = torch.arange(0, dim, 2, dtype=WIDE, device=positions.device) / dim
    angle = positions.to(WIDE)[..., None] * base**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [..., heads, dim] by [..., dim / 2] tables; products and sum rounded to x's dtype, as Hugging Face writes
    it."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(scale * q k^T) v, rounded once to the query's dtype.

    Args:
        query: [batch, heads, queries, dim].
        key, value: [batch, key heads, keys, dim]; heads is a multiple of key heads (grouped queries).
        allowed: bool, broadcastable to [batch, 1, queries, keys]; keys that are not allowed contribute an exact zero.
        scale: of the scores.

    Returns:
        [batch, heads, queries, dim]; zero where a query may see no key (padding).
    """
    batch, heads, queries, dim = query.shape
    groups = heads // key.shape[1]
    grouped = query.to(WIDE).reshape(batch, key.shape[1], groups * queries, dim)
    scores = (grouped @ key.to(WIDE).transpose(-1, -2)).reshape(batch, heads, queries, -1) * scale
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    mixed = weights.reshape(batch, key.shape[1], groups * queries, -1) @ value.to(WIDE)
    return mixed.reshape(batch, heads, queries, dim).to(query.dtype)


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """x @ weight.T rounded once to ``out_dtype``, the bias added after that rounding."""
    y = (x.to(WIDE) @ weight.to(WIDE).t()).to(out_dtype)
    return y if bias is None else y + bias.to(out_dtype)


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log softmax of float32 logits [..., vocab] at ``labels`` [...], by the operator vLLM's sampler calls.

    vllm/v1/sample/ops/topk_topp_sampler.py, ``logits.log_softmax(dim=-1, dtype=torch.float32)``: each row is computed
    by itself, so the batch around it does not matter; verl's own logits - logsumexp rounds differently.
    """
    return logits.log_softmax(dim=-1, dtype=torch.float32).gather(-1, labels[..., None]).squeeze(-1)


class _Exact(torch.autograd.Function):
    """Forward by one function, backward as the vector-Jacobian product of another on the same inputs."""

    @staticmethod
    def forward(ctx, exact, ordinary, *inputs):
        ctx.ordinary = ordinary
        ctx.save_for_backward(*inputs)
        with torch.autocast(inputs[0].device.type, enabled=False):
            return exact(*inputs)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            inputs = [
                t.detach().requires_grad_(needed)
                for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
            ]
            output = ctx.ordinary(*inputs)
            wanted = [t for t in inputs if t.requires_grad]
            found = iter(torch.autograd.grad(output, wanted, grad.to(output.dtype)))
        return None, None, *(next(found) if t.requires_grad else None for t in inputs)


def with_ordinary_backward(
    exact: Callable[..., torch.Tensor], ordinary: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> torch.Tensor:
    """``exact(*inputs)``, whose gradient is that of ``ordinary(*inputs)``, recomputed in the backward pass."""
    return _Exact.apply(exact, ordinary, *inputs)
