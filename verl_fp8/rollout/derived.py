"""What vLLM computes from weights once, after loading: made again at every sync, and proved through the layer.

Problem: vLLM's loader calls ``process_weights_after_loading`` of every quantisation method and attention layer. verl
calls it again after a sync of a model in bf16; of a model in FP8 it calls that of the FP8 layers alone. Everything
else derived keeps the values of the load before, under parameters that equal the trainer's in every byte. Of vLLM
0.30 that is:

* MLA (DeepSeek, Moonlight, Kimi, GLM-4.7-Flash): decoding multiplies by W_UK and W_UV, made from kv_b_proj; prefill
  uses kv_b_proj itself, so that a prompt's log-probs look right.
* attention sinks (gpt-oss): a float32 copy under FlashInfer; other backends read the parameter.
* delta nets (Qwen3-Next, Qwen3.5) on a CPU with AVX-512-BF16: conv1d.weight is packed, and no loader fits it any
  more.
* experts in high precision: FlashInfer's CUTLASS class swaps gate and up, AITER shuffles.

Qwen3, Llama, Gemma-3, GLM-4.5-MoE, Qwen2.5-VL and Qwen3-VL have none beside those of their experts: norms (Gemma's 1
+ w), the router's bias, A_log, tied heads and patch embeddings are read as they are; rotary tables depend on no
weight.

Way: :func:`refuse` what cannot be made again, :func:`open_packed` before the first bucket, :func:`rebuild` after the
last one by vLLM's own hooks, :func:`probe` what came out. What surprises: a hook may allocate a new tensor, while
CUDA graphs hold the old one, so results are copied into the old storage. With kv_b_proj in bf16, W_UK and W_UV are
views of it and never stale. MLA's hook may fall back to kv_b_proj's own product with an identity matrix, so that
layers' caches must be dropped before it. A second call of an experts' hook would swap back what the first has
swapped. On a CPU with AMX, MLA's backend packs kv_b_proj and throws it away; :func:`keep_plain_mla` chooses the other
one.
"""

from collections.abc import Callable, Iterator

import torch
import wrapt

from verl_fp8.errors import SyncError
from verl_fp8.switches.settings import settings_of
from verl_fp8.upstream.contract import require

# A unit vector's product has one term: the two ways round it at most once each, and hardly ever differently.
_ROUNDINGS, _SHARE = 2.0**-6, 0.01
# Where vLLM keeps the plain copy of a packed convolution, and where we keep the packed one while weights arrive.
_PLAIN, _PACKED = "_cpu_unpacked_conv_weight", "_verl_fp8_packed"


def keep_plain_mla() -> None:
    """Have vLLM on a CPU take the MLA backend that leaves kv_b_proj as it is, where ``fp8`` is asked; idempotent."""
    require("rollout.derived")
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def check(wrapped, instance, args, kwargs):
        config = args[0] if args else kwargs["vllm_config"]
        model, attention = config.model_config, config.attention_config
        if settings_of(config) is not None and model is not None and model.use_mla and attention.backend is None:
            # An older vLLM has no such backend, and none that packs either.
            attention.backend = getattr(AttentionBackendEnum, "CPU_MLA", None)
        return wrapped(*args, **kwargs)

    if not isinstance(vars(CpuPlatform)["check_and_update_config"], wrapt.FunctionWrapper):
        wrapt.wrap_function_wrapper(CpuPlatform, "check_and_update_config", check)


def refuse(model: torch.nn.Module) -> None:
    """Name the first layer of vLLM's model whose derived weights no sync could reach.

    Raises:
        SyncError: the layer, what it derives, and what to set instead.
    """
    require("rollout.derived")
    from vllm.model_executor.layers.attention import Attention, MLAAttention, MMEncoderAttention

    if hasattr(model, "process_weights_after_loading"):
        raise _unreachable("the model", type(model).__name__, "this architecture is not served: train it without +fp8")
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not _known(method):
            fix = "remove the quantisation of this layer from the model's configuration"
            raise _unreachable(name, type(method).__name__, fix)
        if _is_bf16_experts(module) and module.w13_weight.ndim != 3:
            fix = "actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend=triton"
            raise _unreachable(name, "experts in another layout than the checkpoint's", fix)
    for name, module in _attention(model):
        if getattr(module, "is_amx_bmm_enabled", False):  # vLLM packs kv_b_proj and throws the weight away
            fix = "+actor_rollout_ref.rollout.engine_kwargs.vllm.attention_config.backend=CPU_MLA"
            raise _unreachable(name, "W_UK and W_UV packed for AMX", fix)
        absorbed = not _is_mla(module) or (hasattr(module, "W_UK_T") and hasattr(module, "W_UV"))
        if not isinstance(module, (Attention, MLAAttention, MMEncoderAttention)) or not absorbed:
            fix = "choose another backend with actor_rollout_ref.rollout.engine_kwargs.vllm.attention_config.backend"
            raise _unreachable(name, f"weights of {type(module).__name__} in its own form", fix)


def open_packed(model: torch.nn.Module) -> None:
    """Give packed convolutions the checkpoint's [channels, 1, width] back, so that vLLM's loader fits."""
    for module in model.modules():
        unpacked = getattr(module, _PLAIN, None)
        if unpacked is not None and module.weight.ndim == 2:
            module.__dict__[_PACKED] = module.weight.data
            module.weight.data = unpacked.unsqueeze(1)


def rebuild(model: torch.nn.Module, dtype: torch.dtype, *, experts: bool) -> None:
    """Derive everything again from the parameters as they are now, in the same storage.

    Args:
        model: vLLM's, after the last bucket, with no layer's own cache left.
        dtype: the activations', as vLLM's loader passes it.
        experts: those in high precision too; False where verl has called their hooks.
    """
    with torch.no_grad():
        for module in model.modules():
            if _PACKED in module.__dict__:
                _pack(module)
            elif experts and _is_bf16_experts(module):
                hook = module.quant_method.process_weights_after_loading
                _in_place([module], lambda hook=hook, module=module: hook(module))
        for _, module in _attention(model):
            # MLA's hook calls its implementation's. Attention's also sets the KV cache's scales to 1.
            hook = module if _is_mla(module) else getattr(module, "impl", None)
            if hook is not None:
                holders = [module, getattr(module, "impl", None)]
                _in_place(holders, lambda hook=hook: hook.process_weights_after_loading(dtype))


def verl_calls_hooks_of_fp8_alone(vllm_config: object) -> bool:
    """Whether verl, which asks the same of a sync (vllm_quant_utils.py), leaves the hooks of unquantised layers out."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    return isinstance(vllm_config.quant_config, Fp8Config)


def probe(model: torch.nn.Module) -> int:
    """Compare what layers compute from derived weights with what they compute from the weights themselves.

    For MLA, unit vectors go through kv_b_proj as prefill does it (an FP8 layer quantises a unit vector exactly) and
    through W_UK and W_UV as decode does it.

    Returns:
        How many layers were probed.

    Raises:
        SyncError: the first layer where they differ.
    """
    probed = 0
    with torch.no_grad():
        for name, module in _attention(model):
            pairs = _mla(module) if _is_mla(module) else _sinks(module)
            for what, used, expected in pairs:
                _compare(name, what, used, expected)
            probed += bool(pairs)
        for name, module in model.named_modules():
            if (unpacked := getattr(module, _PLAIN, None)) is not None:
                _compare(name, "the packed convolution", module.weight, _packed(unpacked))
                probed += 1
    return probed


def _mla(module: torch.nn.Module) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, decode's values, prefill's values) of one MLA layer: [rank, heads, k] and [rank, heads, v]."""
    rank, heads = module.kv_lora_rank, module.num_heads
    unit = torch.eye(rank, dtype=module.W_UV.dtype, device=module.W_UV.device)
    both = module.kv_b_proj(unit)[0].view(rank, heads, module.qk_nope_head_dim + module.v_head_dim)
    keys, values = both.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
    out = values.new_empty(rank, heads * module.v_head_dim)
    module._v_up_proj(unit[:, None].expand(rank, heads, rank).contiguous(), out)
    pairs = [
        ("W_UK", module.W_UK_T.permute(2, 0, 1), keys),
        ("W_UV", out.view(rank, heads, module.v_head_dim), values),
    ]
    gathered = getattr(module, "W_UK_T_dcp_qrep", None)
    if gathered is not None:
        start = _context_rank() * heads
        pairs.append(("the gathered W_UK", gathered[start : start + heads].permute(2, 0, 1), keys))
    return pairs


def _sinks(module: torch.nn.Module) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    impl = getattr(module, "impl", None)
    source = getattr(impl, "_sinks_source", None)
    return [] if source is None else [("the sinks", impl.sinks, source.float())]


def _compare(name: str, what: str, used: torch.Tensor, expected: torch.Tensor) -> None:
    differs = used.shape != expected.shape
    if not differs and not torch.equal(used, expected):
        a, b = used.float(), expected.float()
        unequal = (a != b).double().mean().item()
        differs = unequal > _SHARE or bool(((a - b).abs() > _ROUNDINGS * b.abs()).any())
    if differs:
        raise SyncError(
            f"{what} of {name} made from the weights that arrived",
            "the layer computes with other values: they were not derived again",
            "report this with the vLLM version: what it derives after loading changed",
        )


def _attention(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Layers with a hook that vLLM calls after all others, by name; some quantisation methods are modules too."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name, module in model.named_modules():
        hook = getattr(module, "process_weights_after_loading", None)
        if name and callable(hook) and not isinstance(module, QuantizeMethodBase):
            yield name, module


def _is_mla(module: torch.nn.Module) -> bool:
    return hasattr(module, "kv_b_proj") and hasattr(module, "kv_lora_rank")


def _is_bf16_experts(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    return isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod)


def _known(method: object) -> bool:
    """Whether a sync rebuilds what a layer's method makes after loading, or the method makes nothing."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    served = (Fp8LinearMethod, Fp8MoEMethod)  # verl's staging, and rollout.worker's comparison
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod, BaseKVCacheMethod)
    if isinstance(method, served + plain) or hasattr(method, "serves_verl_fp8"):
        return True
    hook = getattr(type(method), "process_weights_after_loading", None)
    return hook is None or hook is QuantizeMethodBase.process_weights_after_loading


def _in_place(holders: list[object], derive: Callable[[], None]) -> None:
    """Call a hook, then move each tensor that it put in another's place into that one's storage."""
    before = [(h, dict(_tensors(h))) for h in holders if h is not None]
    derive()
    for holder, old in before:
        for name, new in list(_tensors(holder)):
            held = old.get(name)
            same_form = held is not None and (held.shape, held.dtype) == (new.shape, new.dtype)
            if same_form and held.numel() and held.data_ptr() != new.data_ptr():
                held.data.copy_(new.data)
                setattr(holder, name, held)


def _tensors(holder: object) -> Iterator[tuple[str, torch.Tensor]]:
    places = [vars(holder)]
    if isinstance(holder, torch.nn.Module):
        places += [holder._parameters, holder._buffers]
    for place in places:
        yield from ((name, value) for name, value in place.items() if isinstance(value, torch.Tensor))


def _pack(module: torch.nn.Module) -> None:
    packed = module.__dict__.pop(_PACKED)
    if module.weight.ndim == 3:  # else verl has called vLLM's hook, which packs
        loaded = module.weight.data[:, 0].contiguous()
        getattr(module, _PLAIN).copy_(loaded)
    packed.copy_(_packed(getattr(module, _PLAIN)))
    module.weight.data = packed


def _packed(weight: torch.Tensor) -> torch.Tensor:
    from vllm import _custom_ops

    return _custom_ops.causal_conv1d_weight_pack(weight.contiguous())


def _context_rank() -> int:
    from vllm.distributed.parallel_state import get_dcp_group

    return get_dcp_group().rank_in_group


def _unreachable(name: str, what: str, fix: str) -> SyncError:
    return SyncError(
        "every weight that vLLM derives after loading made again at a sync",
        f"{name} holds {what}, which no sync reaches",
        fix,
    )
