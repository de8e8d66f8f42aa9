"""The ``torch`` backend: our quantiser and ``torch.nn.functional.scaled_mm``, whose blockwise kernels are cuBLASLt's.

On Hopper TransformerEngine reaches the same kernels; this backend needs torch 2.10 and nothing else. All three GEMMs
are a @ b.T of two :class:`~verl_fp8.numerics.QuantizedTensor`, as in :func:`verl_fp8.numerics.gemm`:

========  =======================  =======================  ================
GEMM      a                        b                        contracted
========  =======================  =======================  ================
forward   x, 1x128                 W, 128x128               in_features
dgrad     dy, 1x128                W.T, 128x128             out_features
wgrad     dy.T, 1x128              x.T, 1x128               tokens
========  =======================  =======================  ================

:func:`arguments` lays the operands out as the kernels read them (ATen/native/cuda/ScaledBlas.cpp): codes row-major along
the contracted dimension; 1x128 scales [M, K/128] with strides (1, M); 128x128 scales as [K/128 padded to a multiple of
4, N/128] with stride 1 first.

Weights are quantised at every call, also in the backward: FSDP2 frees the gathered weight between the two. Here, unlike
in the reference, nothing looks for infinities and NaN in a weight, as that would stall the GPU in every layer; the weight
sync looks at every weight before the next rollout and raises.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from verl_fp8 import experts, numerics
from verl_fp8.errors import ConfigError, DataError
from verl_fp8.hardware import GPU_BLOCK
from verl_fp8.numerics import QuantizedTensor
from verl_fp8.recipe import Recipe

# Tokens are contracted in the wgrad: whole blocks of them. Zero rows change nothing (verl_fp8.numerics).
TOKENS = 128


class ScaledMMFp8Linear(nn.Linear):
    """A linear layer whose GEMMs are ``scaled_mm``; still an ``nn.Linear`` with the same parameters.

    Attributes:
        recipe: the :class:`~verl_fp8.recipe.Recipe`, set by :func:`to_scaled_mm`.
    """

    recipe: Recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in x's dtype, or autocast's where that is on.

        Raises:
            ConfigError: x is not on a CUDA device.
        """
        _check_device(x)
        if torch.is_autocast_enabled("cuda"):
            x = x.to(torch.get_autocast_dtype("cuda"))
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
    """Let fused experts (:mod:`verl_fp8.experts`) compute by ``scaled_mm``, one call an expert and GEMM.

    Raises:
        ConfigError: as :func:`to_scaled_mm`; the experts' width is no multiple of the block's rows.
    """
    _check(recipe)
    experts.to_fp8(module, recipe, grouped_linear)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], recipe: Recipe) -> torch.Tensor:
    """The :data:`~verl_fp8.experts.GroupedLinear` of this backend.

    Raises:
        ConfigError: x is not on a CUDA device.
    """
    _check_device(x)
    return experts.Fp8GroupedLinearFunction.apply(x, weight, counts, recipe, Fp8ScaledMM)


def _check(recipe: Recipe) -> None:
    if recipe.weight_block != GPU_BLOCK:
        raise ConfigError(
            f"fp8.backend=torch with fp8.recipe.weight_block={list(recipe.weight_block)}",
            "kernels for 128x128 only",
            "set fp8.recipe.weight_block=[128,128]",
        )
    if not hasattr(nn.functional, "scaled_mm"):
        raise ConfigError("fp8.backend=torch", f"torch {torch.__version__} without scaled_mm", "install torch 2.10 or newer")


def _check_device(x: torch.Tensor) -> None:
    if x.device.type != "cuda":
        raise ConfigError("fp8.backend=torch", f"an activation on {x.device}", "set fp8.backend=reference")


class Fp8ScaledMM(torch.autograd.Function):
    """y = Q(x) @ Q(W).T and the backward the recipe asks for; :class:`verl_fp8.numerics.Fp8LinearFunction` on the GPU.

    x: [tokens, K], weight: [N, K], one dtype; y: [tokens, N]. The wgrad's operand x.T is quantised in the forward, in the
    same pass as x, and kept as codes: one byte a value.
    """

    @staticmethod
    def forward(ctx, x, weight, recipe):
        dx_wanted, dw_wanted, _ = ctx.needs_input_grad
        tokens, padded = x.shape[0], _padded(x)
        w_q = quantize_weight(weight, recipe)
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
                dx = gemm(dy_q, quantize_weight(weight, recipe, transposed=True), dtype)[: ctx.tokens]
            return dx, dw, None
        if recipe.backward == "dequantized":
            if weight is not None:
                weight = quantize_weight(weight, recipe).dequantize(dtype)
            if kept:
                kept = [QuantizedTensor(*kept, recipe.activation_block).dequantize(dtype)[: ctx.tokens]]
        if weight is not None:
            dx = dy @ weight
        if kept:
            dw = dy.t() @ kept[0]
        return dx, dw, None


def gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    """a @ b.T on a Hopper GPU, [M, N] in ``out_dtype``; what :func:`verl_fp8.numerics.gemm` defines."""
    rows, columns = a.shape[0], b.shape[0]
    if 0 in (*a.shape, columns):
        return torch.zeros((rows, columns), dtype=out_dtype, device=a.data.device)
    y = nn.functional.scaled_mm(**arguments(a, b), output_dtype=out_dtype, use_fast_accum=False)
    return y if y.shape == (rows, columns) else y[:rows, :columns].contiguous()


def arguments(a: QuantizedTensor, b: QuantizedTensor) -> dict[str, Any]:
    """Operands of ``scaled_mm`` for a @ b.T, laid out as the kernels demand; copies only what is not so already.

    Ragged sizes are padded with zero codes: K to whole blocks, M to 4 (strides of 16 bytes in the scales), N to 16
    (rows of 16 bytes) or, for 128x128, to whole blocks. The product then has the padded [M, N].

    Args:
        a: [M, K] in blocks of 1x128.
        b: [N, K] in blocks of 128x128 or 1x128.

    Raises:
        DataError: other blocks, or operands that do not fit.
    """
    from torch.nn.functional import ScalingType

    recipes = {(1, 128): ScalingType.BlockWise1x128, GPU_BLOCK: ScalingType.BlockWise128x128}
    if a.block != (1, 128) or b.block not in recipes or a.shape[1] != b.shape[1]:
        raise DataError(
            "a product [M, K] x [N, K] of FP8 codes in blocks of 1x128 by 128x128 or 1x128",
            f"{tuple(a.shape)} in {a.block} by {tuple(b.shape)} in {b.block}",
            "quantise both along the contracted dimension",
        )
    square = b.block == GPU_BLOCK
    a, b = _whole(a, 4), _whole(b, 128 if square else 16)
    return {
        "mat_a": a.data,
        "scale_a": outer_major(a.scale_inv),
        "scale_recipe_a": recipes[a.block],
        "mat_b": b.data.t(),
        "scale_b": block_scales(b.scale_inv) if square else outer_major(b.scale_inv),
        "scale_recipe_b": recipes[b.block],
    }


def _whole(q: QuantizedTensor, rows: int) -> QuantizedTensor:
    """The same operand with contiguous codes, its rows padded to a multiple of ``rows`` and its columns to one of 128."""
    down, right = -q.shape[0] % rows, -q.shape[1] % 128
    if not down and not right:
        return QuantizedTensor(q.data.contiguous(), q.scale_inv, q.block)
    data = nn.functional.pad(q.data.view(torch.uint8), (0, right, 0, down)).view(q.data.dtype)
    # A square block that grows keeps its scale; blocks of one row need one for each new row.
    more = down if q.block[0] == 1 else 0
    return QuantizedTensor(data, nn.functional.pad(q.scale_inv, (0, 0, 0, more), value=1.0), q.block)


def outer_major(scale_inv: torch.Tensor) -> torch.Tensor:
    """[M, K/128] scales with strides (1, M), whatever they were."""
    strides = (1, scale_inv.shape[0])
    if scale_inv.stride() == strides:
        return scale_inv
    # Not .t().contiguous().t(): where M or K/128 is 1, that keeps any stride.
    out = torch.empty_strided(scale_inv.shape, strides, dtype=scale_inv.dtype, device=scale_inv.device)
    return out.copy_(scale_inv)


def block_scales(scale_inv: torch.Tensor) -> torch.Tensor:
    """[N/128, K/128] scales -> [K/128 padded to a multiple of 4, N/128] with stride 1 along the first dimension."""
    rows, blocks = scale_inv.shape
    padded = blocks + -blocks % 4
    if scale_inv.stride() == (padded, 1):
        return scale_inv.t()
    out = scale_inv.new_ones((rows, padded))  # the padding is never read: the GEMM's K ends before it
    out[:, :blocks] = scale_inv
    return out.t()


def quantize_rows(x: torch.Tensor, recipe: Recipe) -> QuantizedTensor:
    """x in blocks of 1x128: Triton on a GPU, numerics.quantize elsewhere; the same bits."""
    n, options = recipe.activation_block[1], _options(recipe)
    if x.is_cuda:
        from verl_fp8 import triton_quant

        return triton_quant.quantize_rows(x, n, **options)
    return numerics.quantize(x, (1, n), check_finite=False, **options)


def quantize_both(
    x: torch.Tensor, recipe: Recipe, *, along_rows: bool = True
) -> tuple[QuantizedTensor | None, QuantizedTensor]:
    """x and x transposed, each in blocks of 1x128 (see :func:`verl_fp8.triton_quant.quantize_both`)."""
    n, options = recipe.activation_block[1], _options(recipe)
    if x.is_cuda:
        from verl_fp8 import triton_quant

        return triton_quant.quantize_both(x, n, along_rows=along_rows, **options)
    transposed = numerics.quantize(x, (n, 1), check_finite=False, **options).t()
    transposed = QuantizedTensor(transposed.data.contiguous(), transposed.scale_inv, transposed.block)
    return (quantize_rows(x, recipe) if along_rows else None), transposed


def quantize_weight(weight: torch.Tensor, recipe: Recipe, *, transposed: bool = False) -> QuantizedTensor:
    """A weight in blocks of 128x128, or the same codes and scales transposed with contiguous codes."""
    options = _options(recipe)
    if weight.is_cuda:
        from verl_fp8 import triton_quant

        return triton_quant.quantize_blocks(weight, recipe.weight_block, transposed=transposed, **options)
    quantized = numerics.quantize(weight, recipe.weight_block, check_finite=False, **options)
    return quantized.t() if transposed else quantized


def _options(recipe: Recipe) -> dict[str, Any]:
    return {"scale_format": recipe.scale_format, "eps": recipe.eps}


def _padded(x: torch.Tensor) -> torch.Tensor:
    missing = -x.shape[0] % TOKENS
    return nn.functional.pad(x, (0, 0, 0, missing)) if missing else x

