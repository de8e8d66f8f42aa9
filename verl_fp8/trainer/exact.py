"""The exact mode in a Hugging Face model: module swap and attention registry, before sharding."""

import functools

import torch
import wrapt
from torch import nn

from verl_fp8.errors import ConfigError
from verl_fp8.numerics import exact
from verl_fp8.numerics.linear import autocast_input
from verl_fp8.trainer.reference import ReferenceFp8Linear
from verl_fp8.upstream import patched

ATTENTION = "verl_fp8_exact"


def check_config(config) -> None:
    """Refuse models whose operations are not all defined in :mod:`verl_fp8.numerics.exact`.

    Raises:
        ConfigError: names the architecture or the feature.
    """
    asked, fix = "fp8.exact=true", "set fp8.exact=false for this model"
    architecture = (getattr(config, "architectures", None) or ["unknown"])[0]
    if architecture not in exact.ARCHITECTURES:
        raise ConfigError(asked, f"{architecture}; defined for {', '.join(exact.ARCHITECTURES)}", fix)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope != "default":
        raise ConfigError(asked, f"rope_type={rope}; only the default rotary embedding is defined", fix)
    if getattr(config, "hidden_act", "silu") != "silu":
        raise ConfigError(asked, f"hidden_act={config.hidden_act}; only silu is defined", fix)
    if getattr(config, "use_sliding_window", False):
        raise ConfigError(asked, "use_sliding_window=true; only full attention is defined", fix)


class ExactSiLU(nn.Module):
    """SiLU by :func:`verl_fp8.numerics.exact.silu`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return exact.with_ordinary_backward(exact.silu, torch.nn.functional.silu, x)


class ExactDense(nn.Linear):
    """A high-precision linear layer by :func:`verl_fp8.numerics.exact.dense`; ``out_dtype`` None keeps the input's
    dtype."""

    out_dtype: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = autocast_input(x)
        weight, out_dtype = self.weight.to(x.dtype), self.out_dtype or x.dtype
        y = exact.with_ordinary_backward(
            lambda a, w: exact.dense(a, w, None, out_dtype),
            lambda a, w: torch.nn.functional.linear(a, w),
            x,
            weight,
        )
        return y if self.bias is None else y + self.bias.to(out_dtype)


def _ordinary_norm(eps: float):
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.float()).to(x.dtype)

    return norm


class ExactRMSNormMixin:
    """RMSNorm by :func:`verl_fp8.numerics.exact.rms_norm`, over Hugging Face's parameters."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        eps = self.variance_epsilon
        return exact.with_ordinary_backward(
            lambda x, w: exact.rms_norm(x, w, eps), _ordinary_norm(eps), hidden_states, self.weight
        )


class ExactRotaryMixin:
    """Rotary tables by :func:`verl_fp8.numerics.exact.rope_table`."""

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, **kwargs):
        dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        cos, sin = exact.rope_table(position_ids, dim, float(self.config.rope_parameters["rope_theta"]), x.dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """An entry of Hugging Face's attention registry: [batch, heads, tokens, dim] -> [batch, tokens, heads, dim]."""
    if dropout:
        raise ConfigError(
            "fp8.exact=true", f"attention dropout {dropout}", "set attention_dropout=0 in the model's configuration"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    elif attention_mask.dtype == torch.bool:
        allowed = attention_mask[..., :keys]
    else:
        allowed = attention_mask[..., :keys] == 0

    def ordinary(q, k, v):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q.float() @ k.float().transpose(-1, -2) * scaling).masked_fill(
            ~allowed, torch.finfo(torch.float32).min
        )
        return (torch.softmax(scores, dim=-1) @ v.float()).to(q.dtype)

    mixed = exact.with_ordinary_backward(
        lambda q, k, v: exact.attention(q, k, v, allowed, scaling), ordinary, query, key, value
    )
    return mixed.transpose(1, 2).contiguous(), None


@functools.cache
def _register_attention() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


def make_exact(model: nn.Module) -> None:
    """Swap norms, activation, rotary tables, attention, lm_head and the remaining linears of a causal LM, in place.

    Parameters and state-dict keys stay. FP8 layers must have been swapped before; they accumulate in float64 from then
    on.

    Raises:
        ConfigError: the model is not one of the defined architectures.
    """
    check_config(model.config)
    _register_attention()
    model.set_attn_implementation(ATTENTION)
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            _mix(module, ExactRMSNormMixin)
        elif kind.endswith("RotaryEmbedding"):
            _mix(module, ExactRotaryMixin)
        elif kind.endswith("MLP"):
            module.act_fn = ExactSiLU()
        elif isinstance(module, ReferenceFp8Linear):
            module.accumulate = exact.WIDE
        elif type(module) is nn.Linear:
            module.__class__ = ExactDense
            module.out_dtype = torch.float32 if module is head else None


def match_log_softmax(module) -> None:
    """Let verl's FSDP engine take log-probs from logits as vLLM's sampler does. Idempotent; where the source asks the
    engine, :class:`verl_fp8.trainer.engine_fsdp.Fp8EngineMixin` answers instead.

    Args:
        module: verl.workers.engine.fsdp.transformer_impl, whose ``logprobs_from_logits(logits, labels, ...)`` is
            wrapped.
    """
    if isinstance(module.logprobs_from_logits, wrapt.FunctionWrapper) or patched.carries(
        module, "logprobs_from_logits"
    ):
        return

    def log_probs(wrapped, instance, args, kwargs):
        return exact.log_probs(kwargs["logits"], kwargs["labels"])

    wrapt.wrap_function_wrapper(module, "logprobs_from_logits", log_probs)


def _mix(module: nn.Module, mixin: type) -> None:
    cls = type(module)
    module.__class__ = type(f"Exact{cls.__name__}", (mixin, cls), {"__doc__": mixin.__doc__})


class Fp32Head(nn.Linear):
    """lm_head in float32 (``fp8.lm_head=fp32``): operands and logits, in any mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return torch.nn.functional.linear(x.float(), self.weight.float(), bias)


def make_fp32_head(model: nn.Module) -> None:
    """Turn the output head into :class:`Fp32Head`, the same object.

    Raises:
        ConfigError: the model's head is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError("fp8.lm_head=fp32", f"an output head of class {type(head).__name__}", "set fp8.lm_head=model")
    head.__class__ = Fp32Head
