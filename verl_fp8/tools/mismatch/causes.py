"""The causes of a mismatch: each changes one operation of a Hugging Face model and nothing else.

The baseline is the exact mode's forward (:mod:`verl_fp8.trainer.exact`). There neither the batch nor the order of
summation reaches a rounding, so a model under a :class:`Cause` differs from the baseline by that cause alone.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from verl_fp8.numerics import exact
from verl_fp8.numerics.linear import gemm
from verl_fp8.numerics.quantize import FP8_DTYPE, FP8_MAX, QuantizedTensor, quantize_activation
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer.exact import ExactDense, ExactRMSNormMixin, ExactRotaryMixin, ExactSiLU, Fp32Head


class CodesLinear(nn.Linear):
    """A linear layer that computes with FP8 codes given to it, not with its own weight; forward only.

    Attributes:
        codes: of the weight, [out, in].
        recipe: of the activations.
        quantizer: (x [tokens, in], recipe) -> QuantizedTensor, or None to leave the activations as they are.
        accumulate: of the product.
    """

    codes: QuantizedTensor
    recipe: Recipe
    quantizer: Callable[[torch.Tensor, Recipe], QuantizedTensor] | None
    accumulate: torch.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in x's dtype, or autocast's where that is on."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        flat = x.reshape(-1, x.shape[-1])
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            if self.quantizer is None:
                y = (flat.to(self.accumulate) @ self.codes.dequantize(self.accumulate).t()).to(x.dtype)
            else:
                y = gemm(self.quantizer(flat, self.recipe), self.codes, x.dtype, accumulate=self.accumulate)
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def vllm_quantizer(x: torch.Tensor, recipe: Recipe) -> QuantizedTensor:
    """vLLM's own float-scale quantiser: amax / 448, x / scale, of its CUDA group quantiser."""
    width = recipe.activation_block[1]
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % width)).unflatten(1, (-1, width))
    amax = groups.abs().amax(-1).clamp_min(1e-10)
    scale = torch.div(amax, torch.full_like(amax, FP8_MAX))
    codes = torch.div(groups, scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    return QuantizedTensor(codes.flatten(1)[:, : x.shape[1]].contiguous(), scale, recipe.activation_block)


def to_codes(
    model: nn.Module,
    codes: Mapping[str, QuantizedTensor],
    recipe: Recipe,
    quantizer: Callable[[torch.Tensor, Recipe], QuantizedTensor] | None = quantize_activation,
    accumulate: torch.dtype = exact.WIDE,
) -> None:
    """Make the named linear layers compute with these codes, in place; their parameters stay.

    Args:
        codes: layer's name -> codes of its weight.
        recipe, quantizer, accumulate: see :class:`CodesLinear`.
    """
    for name, quantized in codes.items():
        linear = model.get_submodule(name)
        linear.__class__ = CodesLinear
        linear.codes, linear.recipe, linear.quantizer, linear.accumulate = quantized, recipe, quantizer, accumulate


@dataclass(frozen=True)
class Cause:
    """One way in which two forwards may differ.

    Attributes:
        name: short.
        meaning: what it replaces by what.
        apply: makes an exact model differ by it while the context is open; None for the batch, which is no part of the
            model.
        ordinary: whether stock trainers and rollouts differ by it; all of these together are a stock forward.
    """

    name: str
    meaning: str
    apply: Callable[[nn.Module], contextlib.AbstractContextManager] | None
    ordinary: bool = True


def causes(*, fp8: bool) -> tuple[Cause, ...]:
    """All causes, of a model with FP8 layers or without."""
    linears = (
        Cause("gemm order", "FP8 products summed in float32 instead of float64", _accumulate_in_float32),
        Cause(
            "activation quantiser",
            "vLLM's amax / 448 and x / scale instead of 448 / amax and x * scale",
            _other_quantizer,
        ),
        Cause("weight scales", "a third of the weight scales one ulp off", _nudged_scales, ordinary=False),
    )
    dense = (Cause("gemm order", "bf16 products by the platform's GEMM instead of float64 sums", _stock_linears),)
    return (
        Cause("lm_head", "bf16 logits instead of float32 ones", _head(nn.Linear)),
        Cause("lm_head float32", "logits summed in float32 instead of float64", _head(Fp32Head), ordinary=False),
        Cause("attention sdpa", "torch's fused attention instead of float64", _attention("sdpa")),
        Cause(
            "attention eager", "Hugging Face's eager attention instead of float64", _attention("eager"), ordinary=False
        ),
        Cause(
            "norm",
            "Hugging Face's RMSNorm, which rounds before the weight, instead of one rounding",
            _stock(ExactRMSNormMixin),
        ),
        Cause(
            "residual",
            "sums kept in float32 for the norm, as vLLM's fused norm does, instead of rounded",
            _wide_residual,
        ),
        Cause("activation", "SiLU * up rounded once, as vLLM's kernel does, instead of twice", _fused_activation),
        Cause("rope tables", "cos and sin by way of float32 angles instead of float64", _stock(ExactRotaryMixin)),
        Cause(
            "rope",
            "rotation in float32 rounded once, as vLLM's kernel does, instead of bf16 products",
            _rope_in_float32,
        ),
        *(linears if fp8 else dense),
        Cause("batch shape", "each sequence alone instead of all together", None, ordinary=False),
    )


@contextlib.contextmanager
def _classes(modules: Iterable[nn.Module], new: Callable[[type], type]) -> Iterator[None]:
    """Other classes for these modules while the context is open."""
    before = [(module, module.__class__) for module in modules]
    try:
        for module, cls in before:
            module.__class__ = new(cls)
        yield
    finally:
        for module, cls in before:
            module.__class__ = cls


@contextlib.contextmanager
def _attributes(owners: Iterable, name: str, value: Callable) -> Iterator[None]:
    """Another value of one attribute of these objects while the context is open; ``value`` maps the old one."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    try:
        for owner, old in before:
            setattr(owner, name, value(old))
        yield
    finally:
        for owner, old in before:
            setattr(owner, name, old)


def _codes_linears(model: nn.Module) -> list[CodesLinear]:
    return [m for m in model.modules() if isinstance(m, CodesLinear)]


def _accumulate_in_float32(model: nn.Module):
    return _attributes(_codes_linears(model), "accumulate", lambda old: torch.float32)


def _other_quantizer(model: nn.Module):
    return _attributes(_codes_linears(model), "quantizer", lambda old: vllm_quantizer)


def _nudged_scales(model: nn.Module):
    def nudge(codes: QuantizedTensor) -> QuantizedTensor:
        scale_inv = codes.scale_inv.clone()
        # The share that 448 / amax written the PyTorch way gets wrong (verl_fp8.numerics.quantize).
        scale_inv.view(torch.int32).view(-1)[::3] += 1
        return dataclasses.replace(codes, scale_inv=scale_inv)

    return _attributes(_codes_linears(model), "codes", nudge)


def _stock_linears(model: nn.Module):
    head = model.get_output_embeddings()
    return _classes([m for m in model.modules() if isinstance(m, ExactDense) and m is not head], lambda cls: nn.Linear)


def _head(cls: type):
    return lambda model: _classes([model.get_output_embeddings()], lambda old: cls)


def _stock(mixin: type):
    """Hugging Face's own class under the exact mode's mixin."""
    return lambda model: _classes([m for m in model.modules() if isinstance(m, mixin)], lambda cls: cls.__bases__[1])


def _attention(implementation: str):
    @contextlib.contextmanager
    def apply(model: nn.Module) -> Iterator[None]:
        before = model.config._attn_implementation
        model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            model.set_attn_implementation(before)

    return apply


class _WideResidual:
    """A decoder layer whose sums reach the norm in float32, while the stream is rounded: vLLM's fused_add_rms_norm."""

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        dtype = self.mlp.gate_proj.weight.dtype
        mixed = self.input_layernorm(hidden_states).to(dtype)
        mixed, _ = self.self_attn(hidden_states=mixed, **kwargs)
        wide = hidden_states.to(dtype).float() + mixed.float()
        return wide.to(dtype).float() + self.mlp(self.post_attention_layernorm(wide).to(dtype)).float()


def _wide_residual(model: nn.Module):
    layers = [m for m in model.modules() if hasattr(m, "post_attention_layernorm")]
    return _classes(layers, lambda cls: type(f"Wide{cls.__name__}", (_WideResidual, cls), {}))


class _FusedActivation:
    """An MLP that rounds SiLU(gate) * up once: vLLM's silu_and_mul."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype))


def _fused_activation(model: nn.Module):
    mlps = [m for m in model.modules() if isinstance(getattr(m, "act_fn", None), ExactSiLU)]
    return _classes(mlps, lambda cls: type(f"Fused{cls.__name__}", (_FusedActivation, cls), {}))


def _rope_in_float32(model: nn.Module):
    def rounded_once(old):
        def rotate(q, k, cos, sin, *args, **kwargs):
            return tuple(t.to(q.dtype) for t in old(q.float(), k.float(), cos.float(), sin.float(), *args, **kwargs))

        return rotate

    modules = {sys.modules[type(m).__module__] for m in model.modules() if hasattr(m, "rotary_emb")}
    return _attributes(modules, "apply_rotary_pos_emb", rounded_once)
