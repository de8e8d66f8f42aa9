"""The reference product of FP8 codes, and the linear layer's forward and backward over it."""

import contextlib

import torch
from torch.autograd.function import once_differentiable

from verl_fp8.numerics.quantize import QuantizedTensor, quantize_activation, quantize_weight
from verl_fp8.numerics.recipe import Recipe


def autocast_input(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype autocast computes in, where it is on: what it does to ``nn.functional.linear``'s input.

    Our autograd functions and TransformerEngine's layers are unknown to autocast, so each casts by itself.
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def gemm(
    a: QuantizedTensor,
    b: QuantizedTensor | torch.Tensor,
    out_dtype: torch.dtype,
    *,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """a @ b.T on dequantised codes: the one reference GEMM of forward, dgrad and wgrad.

    Args:
        a: [M, K].
        b: [N, K], codes, or their ``dequantize(accumulate)`` where a caller keeps it over many calls.
        out_dtype: of the result, rounded to once.
        accumulate: float32, or float64, in which the order of the sum practically never reaches the rounding to
            ``out_dtype``.

    Returns:
        [M, N] in ``out_dtype``.
    """
    operand = b.dequantize(accumulate) if isinstance(b, QuantizedTensor) else b
    return matmul(a.dequantize(accumulate), operand.t(), out_dtype)


def fp8_linear_forward(
    x: torch.Tensor, w_q: QuantizedTensor, recipe: Recipe, *, accumulate: torch.dtype = torch.float32
) -> torch.Tensor:
    """y = Q(x) @ Q(W).T; the bias is the caller's, added in x's dtype after this rounding (as vLLM does).

    Args:
        x: [..., K] bfloat16, float16 or float32; tokens are flattened and quantised by ``recipe.activation_block``.
        w_q: [N, K] codes of the weight.

    Returns:
        [..., N] in x's dtype.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = gemm(quantize_activation(flat, recipe), w_q, x.dtype, accumulate=accumulate)
    return y.reshape(*x.shape[:-1], w_q.shape[0])


class Fp8LinearFunction(torch.autograd.Function):
    """y = Q(x) @ Q(W).T with the backward the recipe asks for. ``apply(x, weight, recipe, accumulate)``.

    x: [tokens, K], weight: [N, K], both in one dtype; y: [tokens, N]. The backward follows TransformerEngine
    (pytorch/module/linear.py, _linear_backward):

    * ``fp8``: dx = Q(dy, 1xn) @ Q(W), with the forward's codes of W; dW = Q(dy, nx1).T @ Q(x, nx1), whose blocks run
      along the tokens, the dimension contracted there. Both are quantised from the original dy and x, not from the
      forward's codes.
    * ``high_precision`` (its backward_override): dx = dy @ W, dW = dy.T @ x, on the original operands.
    * ``dequantized`` (its backward_override): the same on the forward's codes dequantised to x's dtype.

    ``accumulate`` is the forward's (see :func:`gemm`). All other sums are in float32, rounded once to the operand's
    dtype. The weight itself is saved and quantised again in the backward: FSDP2 frees the gathered weight between the
    two and gathers it anew, so codes kept here would be memory it cannot free.
    """

    @staticmethod
    def forward(ctx, x, weight, recipe, accumulate=torch.float32):
        x_q = quantize_activation(x, recipe)
        y = gemm(x_q, quantize_weight(weight, recipe), x.dtype, accumulate=accumulate)
        ctx.recipe = recipe
        dx_wanted, dw_wanted = ctx.needs_input_grad[:2]
        operands = (x_q.data, x_q.scale_inv) if recipe.backward == "dequantized" else (x, None)
        ctx.save_for_backward(weight if dx_wanted else None, *(operands if dw_wanted else (None, None)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        weight, x, x_scale_inv = ctx.saved_tensors
        recipe, dtype = ctx.recipe, dy.dtype
        dx = dw = None
        if recipe.backward == "fp8":
            if weight is not None:
                dy_q = quantize_activation(dy, recipe, recipe.gradient_block)
                dx = gemm(dy_q, quantize_weight(weight, recipe).t(), dtype)
            if x is not None:
                dy_q = quantize_activation(dy, recipe, recipe.gradient_block[::-1])
                x_q = quantize_activation(x, recipe, recipe.activation_block[::-1])
                dw = gemm(dy_q.t(), x_q.t(), dtype)
            return dx, dw, None, None
        if recipe.backward == "dequantized":
            if weight is not None:
                weight = quantize_weight(weight, recipe).dequantize(dtype)
            if x is not None:
                x = QuantizedTensor(x, x_scale_inv, recipe.activation_block).dequantize(dtype)
        if weight is not None:
            dx = matmul(dy.float(), weight.float(), dtype)
        if x is not None:
            dw = matmul(dy.float().t(), x.float(), dtype)
        return dx, dw, None, None


def matmul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """a @ b in the operands' precision, whatever autocast or the process's reduced-precision switches say."""
    kind = a.device.type
    switches = torch.backends.cuda.matmul if kind == "cuda" else torch.backends.mkldnn.matmul
    before = switches.fp32_precision
    if torch.is_autocast_enabled(kind):
        context = torch.autocast(kind, enabled=False)
    else:
        context = contextlib.nullcontext()
    switches.fp32_precision = "ieee"  # TF32 or bf16 would round the operands' scales away
    try:
        with context:
            return (a @ b).to(out_dtype)
    finally:
        switches.fp32_precision = before
