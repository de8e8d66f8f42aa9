"""What ``+fp8=unified_megatron`` needs of verl's Megatron engine, judged on the driver; imports no Megatron.

How Megatron trains in FP8 (megatron-core 0.16 to 0.19, fp8_utils.py, get_fp8_context): it enters TransformerEngine's
autocast around each decoder layer, so every TransformerEngine linear in it is FP8: attention, MLP, each expert.
Embedding, output layer and router are none of TransformerEngine's. The recipe is built without arguments but the
format; scales and backward come from environment variables that TransformerEngine reads when it is imported.

Why blocks must not straddle (:func:`check_blocks`): TransformerEngine quantises the tensor it holds, a fused and
tensor-parallel shard: the heads of each query group in turn, q, k, v; gate above up. The weight sync quantises the
tensors of the checkpoint. Both read the same bf16 values, and a block's codes depend on nothing outside of it, so
all codes are equal if each 128x128 block of one is a block of the other.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import is_router
from verl_fp8.numerics.recipe import GPU_BLOCK
from verl_fp8.rules.asked import Run
from verl_fp8.rules.refuse import Refusal, caught
from verl_fp8.switches.hardware import check_gpu, check_megatron_core, check_transformer_engine
from verl_fp8.trainer.megatron_environment import ASKED, SCALES_VARIABLE

ROLES = ("actor", "ref")

# Of these the layers that are FP8 in Megatron are known to be LayerFilter's.
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")

# TransformerConfig's keys that the group sets, and what they must stay.
TRANSFORMER = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False}
# Pads the tokens that an expert gets; changes no value of a real token.
_PADDING = {"moe_router_padding_for_fp8"}
# Other keys of TransformerConfig or the bridge's provider that change what is computed in which precision.
_PRECISION = {"quant_recipe", "use_kitchen", "use_kitchen_attention", "bf16", "fp16", "params_dtype",
              "moe_use_legacy_grouped_gemm", "use_transformer_engine_op_fuser"}  # fmt: skip


def _path(role: str, key: str) -> str:
    return f"actor_rollout_ref.{role}.megatron.{key}"


def settings_are_megatrons(run: Run) -> Iterator[Refusal]:
    """The keys of ``fp8`` that Megatron cannot be told are at what it does anyway."""
    fp8, recipe = run.fp8, run.fp8.recipe
    asked_of_it = (
        (
            not fp8.exact,
            "fp8.exact=true",
            "defined for Hugging Face models",
            "set fp8.exact=false, or use +fp8=unified",
        ),
        (
            fp8.backend in ("auto", "te"),
            f"fp8.backend={fp8.backend}",
            "Megatron's linears are TransformerEngine's",
            "set fp8.backend=te",
        ),
        (
            fp8.lm_head == "model",
            f"fp8.lm_head={fp8.lm_head}",
            "Megatron's output layer computes in bf16",
            "set fp8.lm_head=model",
        ),
        (
            recipe.weight_block == GPU_BLOCK,
            f"fp8.recipe.weight_block={list(recipe.weight_block)}",
            "TransformerEngine's blocks are 128x128",
            "set fp8.recipe.weight_block=[128,128]",
        ),
        (not recipe.eps, f"fp8.recipe.eps={recipe.eps:g}", "Megatron has no key for it", "set fp8.recipe.eps=0.0"),
    )
    for holds, asked, why, fix in asked_of_it:
        if not holds:
            yield Refusal(asked, f"{ASKED}: {why}", fix)


# What verl's engine must be told: key -> (value, why). An absent key is at that value.
_ENGINE = {
    "use_mbridge": (True, "verl's Megatron engine exports its weights through the bridge"),
    "vanilla_mbridge": (False, "the layers are compared through Megatron-Bridge"),
    "use_megatron_fsdp": (False, "its sharded parameters were not tried in FP8"),
    "dynamic_context_parallel": (False, "verl's engine takes no FP8 with it"),
    "dtype": ("bfloat16", "the recipe quantises bf16"),
}


def engine_trains_so(run: Run) -> Iterator[Refusal]:
    """Actor and reference (verl's McoreEngineConfig): an engine that trains this recipe, and that the sync can read."""
    for role in ROLES:
        node = run.plain(f"{role}.megatron")
        for key, (value, why) in _ENGINE.items():
            if node.get(key, value) != value:
                path = _path(role, key)
                yield Refusal(ASKED, f"{path}={node[key]}: {why}", f"set {path}={str(value).lower()}")
        if (node.get("qat") or {}).get("enable"):
            path = _path(role, "qat.enable")
            yield Refusal(ASKED, f"{path}=True, another quantiser", f"set {path}=false")
        yield from _transformer_config(role, node.get("override_transformer_config") or {})


def _transformer_config(role: str, overrides: Mapping[str, Any]) -> Iterator[Refusal]:
    for key, value in TRANSFORMER.items():
        if overrides.get(key) != value:
            path = _path(role, f"override_transformer_config.{key}")
            asked = f"{ASKED}, which sets {path}={value}"
            yield Refusal(asked, f"{path}={overrides.get(key)}", f"remove the override of {path}")
    for key, value in overrides.items():
        known = key in TRANSFORMER or key in _PADDING
        if not known and ("fp8" in key or "fp4" in key or key in _PRECISION):
            path = _path(role, f"override_transformer_config.{key}")
            found = f"{path}={value}, which changes what is computed in FP8"
            yield Refusal(ASKED, found, f"remove {path}; fp8.* describes the recipe")


def optimizer_is_told_the_recipe(run: Run) -> Iterator[Refusal]:
    """Megatron's distributed optimizer (verl's McoreOptimizerConfig) has the recipe's name."""
    found = (run.plain("actor.optim").get("override_optimizer_config") or {}).get("fp8_recipe")
    if found != TRANSFORMER["fp8_recipe"]:
        path = "actor_rollout_ref.actor.optim.override_optimizer_config.fp8_recipe"
        asked = f"{ASKED}, which sets {path}=blockwise"
        yield Refusal(asked, f"{path}={found}", f"remove the override of {path}")


def machine_can_train(run: Run) -> Iterator[Refusal]:
    """GPUs, CUDA, TransformerEngine and Megatron; or, on a driver without a GPU, the scale format they will have."""
    if not run.fp8.megatron:
        return
    if run.on_cpu:
        yield Refusal(ASKED, "trainer.device=cpu: Megatron trains on GPUs", "use +fp8=unified on CPU")
    if run.machine.capability is not None:
        for check in (check_gpu, check_transformer_engine, check_megatron_core):
            yield from caught(check, ASKED, run.machine)
    elif run.fp8.scale_format == "auto":
        yield Refusal(
            f"fp8.recipe.scale_format=auto with {ASKED}",
            f"a driver without a GPU, which has to set {SCALES_VARIABLE} before the workers start",
            "set fp8.recipe.scale_format=fp32 (Hopper) or pow2 (Blackwell)",
        )


def layers_are_megatrons(run: Run) -> Iterator[Refusal]:
    """Blocks fall on shards, and the layers kept in bf16 are ones that Megatron has keys for."""
    if not run.fp8.megatron:
        return
    layers = run.layers
    keys = bf16_keys(run)
    for role in ROLES:
        node = run.plain(f"{role}.megatron")
        yield from caught(check_blocks, layers.hf_config, layers.shapes, layers.converted, node)
        yield from _bf16_layers(role, node, keys, layers.hf_config.num_hidden_layers)


def _bf16_layers(role: str, node: Mapping[str, Any], wanted: Mapping[str, Any], layers: int) -> Iterator[Refusal]:
    """The user's own keys say what ``fp8.recipe.exclude`` says (the rollout knows nothing else), and one end has no
    more bf16 layers than a pipeline stage, which Megatron would refuse in its workers."""
    overrides = node.get("override_transformer_config") or {}
    for key in ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if key in overrides and overrides[key] != wanted.get(key):
            path = _path(role, f"override_transformer_config.{key}")
            asked = f"{ASKED}, whose bf16 layers fp8.recipe.exclude names"
            fix = f"remove {path} and set fp8.recipe.exclude, e.g. ['model.layers.0.*']"
            yield Refusal(asked, f"{path}={overrides[key]}", fix)
    path = _path(role, "pipeline_model_parallel_size")
    stage = layers // (node.get("pipeline_model_parallel_size") or 1)
    if max((v for k, v in wanted.items() if k.startswith("num_")), default=0) > stage:
        found = f"more layers at one end than the {stage} of a stage, {path}={node['pipeline_model_parallel_size']}"
        yield Refusal(f"fp8.recipe.exclude with {ASKED}", found, f"exclude fewer, or lower {path}")


def bf16_keys(run: Run) -> dict[str, Any]:
    """:func:`bf16_layers` for the run's model."""
    return bf16_layers(run.layers.hf_config.num_hidden_layers, run.layers.converted, run.layers.kept)


def bf16_layers(layers: int, converted: tuple[str, ...], kept: Mapping[str, str]) -> dict[str, Any]:
    """TransformerConfig's keys for the decoder layers that ``fp8.recipe.exclude`` keeps in bf16; empty without any.

    Args:
        layers: of the decoder.
        converted: names of the FP8 linear layers.
        kept: name -> reason for the others.

    Raises:
        ConfigError: not whole layers at the start and the end, which is all that Megatron has keys for.
    """
    fp8 = {_layer(name) for name in converted}
    excluded = {name for name, why in kept.items() if why.startswith("excluded") and not is_router(name)}
    bf16 = {_layer(name) for name in excluded} - {None}
    asked = f"fp8.recipe.exclude with {ASKED}"
    fix = "exclude whole layers at the start or the end, e.g. ['model.layers.0.*'], or use +fp8=unified"
    if partly := fp8 & bf16:
        name = min(n for n in excluded if _layer(n) in partly)
        raise ConfigError(asked, f"{name} in a decoder layer with FP8 ones; Megatron has one precision for each", fix)
    start = next(i for i in range(layers + 1) if i not in bf16)
    end = next(i for i in range(layers + 1) if layers - 1 - i not in bf16)
    if len(bf16) != start + end:
        inside = min(i for i in bf16 if start <= i < layers - end)
        raise ConfigError(asked, f"layer {inside} of {layers} in bf16 between FP8 ones", fix)
    if not bf16:
        return {}
    return {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}


def _layer(name: str) -> int | None:
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return None if found is None else int(found[1])


def check_blocks(
    hf_config: Any, shapes: Mapping[str, tuple[int, int]], converted: tuple[str, ...], node: Mapping[str, Any]
) -> None:
    """Refuse shards in which a block of TransformerEngine's would not be one of the checkpoint's.

    Args:
        hf_config: the Hugging Face configuration.
        shapes: name -> (out, in) of every linear layer.
        converted: the FP8 ones.
        node: ``actor_rollout_ref.actor.megatron``, resolved.

    Raises:
        ConfigError: names the layer, its size and the key.
    """
    if hf_config.model_type not in MODEL_TYPES:
        fix = f"use one of {', '.join(MODEL_TYPES)}, or +fp8=unified"
        raise ConfigError(ASKED, f"a {hf_config.model_type} model", fix)
    unit, key = GPU_BLOCK[0], "tensor_model_parallel_size"
    tp = node.get(key) or 1
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    head = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    if head % unit:
        raise ConfigError(
            f"{ASKED}, where q, k and v are one tensor",
            f"heads of {head}, no multiple of {unit}: a block would hold rows of two projections",
            "use +fp8=unified for this model",
        )
    if groups % tp:
        path = _path("actor", key)
        raise ConfigError(f"{path}={tp}", f"{groups} key and value heads, which it does not divide", f"lower {path}")
    etp = node.get("expert_tensor_parallel_size") or tp
    for name in converted:
        out, in_ = shapes[name]
        if out % 16 or in_ % 16:
            found = f"{name} of {out}x{in_}; TransformerEngine needs multiples of 16"
            raise ConfigError(ASKED, found, "use another model")
        parts, which = (etp, "expert_tensor_parallel_size") if ".experts." in name else (tp, key)
        leaf = name.rpartition(".")[2]
        # Without tensor parallelism too: up starts where gate ends.
        size = {"gate_proj": out, "up_proj": out, "down_proj": in_}.get(leaf, unit * parts)
        if size % (unit * parts):
            path = _path("actor", which)
            raise ConfigError(
                f"blocks of {unit}x{unit} with {path}={parts}",
                f"{name} has {size} / {parts} = {size / parts:g}, no multiple of {unit}: blocks would straddle",
                f"lower {path}" if parts > 1 else "use +fp8=unified for this model",
            )


ENGINE = (settings_are_megatrons, engine_trains_so, optimizer_is_told_the_recipe)
