"""The ``torch`` backend: our quantiser and ``torch.nn.functional.scaled_mm``, whose blockwise kernels are cuBLASLt's.

On Hopper TransformerEngine reaches the same kernels; this backend needs torch 2.10 and nothing else. All three GEMMs
are a @ b.T of two :class:`~verl_fp8.numerics.quantize.QuantizedTensor`, as in :func:`verl_fp8.numerics.linear.gemm`:

========  =======================  =======================  ================
GEMM      a                        b                        contracted
========  =======================  =======================  ================
forward   x, 1x128                 W, 128x128               in_features
dgrad     dy, 1x128                W.T, 128x128             out_features
wgrad     dy.T, 1x128              x.T, 1x128               tokens
========  =======================  =======================  ================

:func:`arguments` lays the operands out as the kernels read them (ATen/native/cuda/ScaledBlas.cpp): codes row-major
along the contracted dimension; 1x128 scales [M, K/128] with strides (1, M); 128x128 scales as [K/128 padded to a
multiple of 4, N/128] with stride 1 first.

Weights are quantised at every call, also in the backward: FSDP2 frees the gathered weight between the two. Here, unlike
in the reference, nothing looks for infinities and NaN in a weight, as that would stall the GPU in every layer; the
weight sync looks at every weight before the next rollout and raises.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from verl_fp8.errors import ConfigError
from verl_fp8.numerics.linear import autocast_input
from verl_fp8.numerics.quantize import QuantizedTensor
from verl_fp8.numerics.recipe import GPU_BLOCK, Recipe
from verl_fp8.numerics.scaled_mm import gemm, quantize_both, quantize_rows, weight_operand
from verl_fp8.trainer import experts

# Tokens are contracted in the wgrad: whole blocks of them. Zero rows change nothing (verl_fp8.numerics.quantize).
TOKENS = 128


class ScaledMMFp8Linear(nn.Linear):
    """A linear layer whose GEMMs are ``scaled_mm``; still an ``nn.Linear`` with the same parameters.

    Attributes:
        recipe: the :class:`~verl_fp8.numerics.recipe.Recipe`, set by :func:`to_scaled_mm`.
    """

    recipe: Recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in x's dtype, or autocast's where that is on.

        Raises:
            ConfigError: x is not on a CUDA device.
        """
        check_device(x)
        x = autocast_input(x)
        # The codes of a bf16 weight and of its float32 master differ in 2 %: quantise what the rollout quantises.
        y = Fp8ScaledMM.apply(x.reshape(-1, x.shape[-1]), self.weight.to(x.dtype), self.recipe)
        y = y.reshape(*x.shape[:-1], self.out_features)
        # Outside the GEMM, after its rounding, as vLLM does.
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """nn.Linear's, with the recipe."""
        return f"{super().extra_repr()}, fp8={self.recipe.digest()}"


def to_scaled_mm(linear: nn.Linear, recipe: Recipe) -> nn.Linear:
    """Turn a plain ``nn.Linear`` into a :class:`ScaledMMFp8Linear`, the same object.

    Raises:
        ConfigError: a recipe these kernels do not compute, or a torch without them.
    """
    _check(recipe)
    linear.__class__ = ScaledMMFp8Linear
    linear.recipe = recipe
    return linear


def to_experts(module: nn.Module, recipe: Recipe) -> None:
    """Let fused experts (:mod:`verl_fp8.trainer.experts`) compute by ``scaled_mm``, one call an expert and GEMM.

    Raises:
        ConfigError: as :func:`to_scaled_mm`; the experts' width is no multiple of the block's rows.
    """
    _check(recipe)
    experts.to_fp8(module, recipe, grouped_linear)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], recipe: Recipe) -> torch.Tensor:
    """The :data:`~verl_fp8.trainer.experts.GroupedLinear` of this backend.

    Raises:
        ConfigError: x is not on a CUDA device.
    """
    check_device(x)
    return experts.Fp8GroupedLinearFunction.apply(x, weight, counts, recipe, Fp8ScaledMM)


def _check(recipe: Recipe) -> None:
    if recipe.weight_block != GPU_BLOCK:
        raise ConfigError(
            f"fp8.backend=torch with fp8.recipe.weight_block={list(recipe.weight_block)}",
            "kernels for 128x128 only",
            "set fp8.recipe.weight_block=[128,128]",
        )
    if not hasattr(nn.functional, "scaled_mm"):
        raise ConfigError(
            "fp8.backend=torch", f"torch {torch.__version__} without scaled_mm", "install torch 2.10 or newer"
        )


def check_device(x: torch.Tensor) -> None:
    if x.device.type != "cuda":
        raise ConfigError("fp8.backend=torch", f"an activation on {x.device}", "set fp8.backend=reference")


class Fp8ScaledMM(torch.autograd.Function):
    """y = Q(x) @ Q(W).T and the backward the recipe asks for; :class:`verl_fp8.numerics.linear.Fp8LinearFunction` on
    the GPU.

    x: [tokens, K], weight: [N, K], one dtype; y: [tokens, N]. The wgrad's operand x.T is quantised in the forward, in
    the same pass as x, and kept as codes: one byte a value.
    """

    @staticmethod
    def forward(ctx, x, weight, recipe):
        dx_wanted, dw_wanted, _ = ctx.needs_input_grad
        tokens, padded = x.shape[0], _padded(x)
        w_q = weight_operand(weight, recipe)
        kept = ()
        if recipe.backward == "fp8" and dw_wanted:
            x_q, x_t = quantize_both(padded, recipe)
            kept = (x_t.data, x_t.scale_inv)
        else:
            x_q = quantize_rows(padded, recipe)
            if dw_wanted:
                kept = (x_q.data, x_q.scale_inv) if recipe.backward == "dequantized" else (x,)
        ctx.recipe, ctx.tokens = recipe, tokens
        ctx.save_for_backward(weight if dx_wanted else None, *kept)
        return gemm(x_q, w_q, x.dtype)[:tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        weight, *kept = ctx.saved_tensors
        recipe, dtype = ctx.recipe, dy.dtype
        dx = dw = None
        if recipe.backward == "fp8":
            padded = _padded(dy)
            if kept:
                dy_q, dy_t = quantize_both(padded, recipe, along_rows=weight is not None)
                dw = gemm(dy_t, QuantizedTensor(*kept, recipe.activation_block), dtype)
            else:
                dy_q = quantize_rows(padded, recipe)
            if weight is not None:
                dx = gemm(dy_q, weight_operand(weight, recipe, transposed=True), dtype)[: ctx.tokens]
            return dx, dw, None
        if recipe.backward == "dequantized":
            if weight is not None:
                weight = weight_operand(weight, recipe).dequantize(dtype)
            if kept:
                kept = [QuantizedTensor(*kept, recipe.activation_block).dequantize(dtype)[: ctx.tokens]]
        if weight is not None:
            dx = dy @ weight
        if kept:
            dw = dy.t() @ kept[0]
        return dx, dw, None


def _padded(x: torch.Tensor) -> torch.Tensor:
    missing = -x.shape[0] % TOKENS
    return nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
