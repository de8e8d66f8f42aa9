"""Where do trainer and rollout first differ? Probes sit at the same places of a Hugging Face decoder and of vLLM's."""

import contextlib
import re
from collections.abc import Iterator

import torch
from torch import nn

# Of each decoder layer, in the order of computation.
PROBES = (
    "input_layernorm",
    "qkv",
    "attention",
    "o_proj",
    "post_attention_layernorm",
    "gate_up",
    "activation",
    "down_proj",
)

_OUTPUTS = {
    "input_layernorm": "input_layernorm",
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"), "qkv"),
    "self_attn.o_proj": "o_proj",
    "post_attention_layernorm": "post_attention_layernorm",
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"), "gate_up"),
    "mlp.down_proj": "down_proj",
}
_INPUTS = {"self_attn.o_proj": "attention", "mlp.down_proj": "activation"}
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_ENDS = {"model.embed_tokens": "embed_tokens", "model.norm": "norm"}


def probes_in_order(layers: int) -> list[str]:
    """The probes of a model with so many layers; what is computed first comes first."""
    return ["embed_tokens", *(f"layers.{i}.{probe}" for i in range(layers) for probe in PROBES), "norm"]


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Record one sequence: probe -> [tokens, width] in bf16 on the CPU. The dict is filled when the context closes.

    Projections that vLLM fuses are concatenated, and so are the chunks of a prefill. The model must call its modules
    one by one: eager mode, no CUDA graphs.
    """
    calls: dict[str, dict[str, list[torch.Tensor]]] = {}
    found: dict[str, torch.Tensor] = {}

    def keep(probe: str, module: str):
        def put(value):
            value = value[0] if isinstance(value, tuple) else value
            calls.setdefault(probe, {}).setdefault(module, []).append(
                value.detach().flatten(0, -2).to("cpu", torch.bfloat16, copy=True)
            )

        return put

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            inside = _LAYER.fullmatch(name)
            output = (
                f"layers.{inside[1]}.{_OUTPUTS[inside[2]]}" if inside and inside[2] in _OUTPUTS else _ENDS.get(name)
            )
            if output:
                put = keep(output, name)
                stack.callback(module.register_forward_hook(lambda m, args, out, put=put: put(out)).remove)
            if inside and inside[2] in _INPUTS:
                put = keep(f"layers.{inside[1]}.{_INPUTS[inside[2]]}", name)
                stack.callback(module.register_forward_pre_hook(lambda m, args, put=put: put(args)).remove)
        yield found
    for probe, modules in calls.items():
        found[probe] = torch.cat([torch.cat(chunks) for chunks in modules.values()], dim=-1)
