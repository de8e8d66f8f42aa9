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

from collections.abc import Mapping
from typing import Any

from verl_fp8.errors import ConfigError
from verl_fp8.numerics.recipe import GPU_BLOCK
from verl_fp8.switches.hardware import Hardware, check_gpu, check_megatron_core, check_transformer_engine
from verl_fp8.switches.settings import Fp8Settings
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


def check_settings(fp8: Fp8Settings) -> None:
    """Refuse what Megatron cannot be told.

    Raises:
        ConfigError: names the key of ``fp8``.
    """
    if fp8.exact:
        fix = "set fp8.exact=false, or use +fp8=unified"
        raise ConfigError("fp8.exact=true", f"{ASKED}: defined for Hugging Face models", fix)
    if fp8.backend not in ("auto", "te"):
        found = f"{ASKED}: Megatron's linears are TransformerEngine's"
        raise ConfigError(f"fp8.backend={fp8.backend}", found, "set fp8.backend=te")
    if fp8.lm_head != "model":
        found = f"{ASKED}: Megatron's output layer computes in bf16"
        raise ConfigError(f"fp8.lm_head={fp8.lm_head}", found, "set fp8.lm_head=model")
    if fp8.recipe.weight_block != GPU_BLOCK:
        raise ConfigError(
            f"fp8.recipe.weight_block={list(fp8.recipe.weight_block)}",
            f"{ASKED}: TransformerEngine's blocks are 128x128",
            "set fp8.recipe.weight_block=[128,128]",
        )
    if fp8.recipe.eps:
        asked = f"fp8.recipe.eps={fp8.recipe.eps:g}"
        raise ConfigError(asked, f"{ASKED}: Megatron has no key for it", "set fp8.recipe.eps=0.0")


def check_machine(fp8: Fp8Settings, machine: Hardware, device: str | None) -> None:
    """Refuse a machine that cannot train so, and a driver that cannot tell the scale format.

    Args:
        machine: the driver's.
        device: ``trainer.device``.

    Raises:
        ConfigError: what is missing.
    """
    if device == "cpu":
        raise ConfigError(ASKED, "trainer.device=cpu: Megatron trains on GPUs", "use +fp8=unified on CPU")
    if machine.capability is not None:
        check_gpu(ASKED, machine)
        check_transformer_engine(ASKED, machine)
        check_megatron_core(ASKED, machine)
    elif fp8.scale_format == "auto":
        raise ConfigError(
            f"fp8.recipe.scale_format=auto with {ASKED}",
            f"a driver without a GPU, which has to set {SCALES_VARIABLE} before the workers start",
            "set fp8.recipe.scale_format=fp32 (Hopper) or pow2 (Blackwell)",
        )


def check_engine(role: str, node: Mapping[str, Any]) -> None:
    """Refuse an engine configuration that would train otherwise, or that the weight sync could not read.

    Args:
        role: ``actor`` or ``ref``.
        node: verl's McoreEngineConfig, ``actor_rollout_ref.<role>.megatron``, resolved.

    Raises:
        ConfigError: names the key.
    """
    wanted = {
        "use_mbridge": (True, "verl's Megatron engine exports its weights through the bridge"),
        "vanilla_mbridge": (False, "the layers are compared through Megatron-Bridge"),
        "use_megatron_fsdp": (False, "its sharded parameters were not tried in FP8"),
        "dynamic_context_parallel": (False, "verl's engine takes no FP8 with it"),
        "dtype": ("bfloat16", "the recipe quantises bf16"),
    }
    for key, (value, why) in wanted.items():
        if node.get(key, value) != value:
            shown = str(value).lower()
            raise ConfigError(ASKED, f"{_path(role, key)}={node[key]}: {why}", f"set {_path(role, key)}={shown}")
    if (node.get("qat") or {}).get("enable"):
        path = _path(role, "qat.enable")
        raise ConfigError(ASKED, f"{path}=True, another quantiser", f"set {path}=false")
    overrides = node.get("override_transformer_config") or {}
    for key, value in TRANSFORMER.items():
        if overrides.get(key) != value:
            path = _path(role, f"override_transformer_config.{key}")
            fix = f"remove the override of {path}"
            raise ConfigError(f"{ASKED}, which sets {path}={value}", f"{path}={overrides.get(key)}", fix)
    for key, value in overrides.items():
        known = key in TRANSFORMER or key in _PADDING
        if not known and ("fp8" in key or "fp4" in key or key in _PRECISION):
            path = _path(role, f"override_transformer_config.{key}")
            fix = f"remove {path}; fp8.* describes the recipe"
            raise ConfigError(ASKED, f"{path}={value}, which changes what is computed in FP8", fix)


def check_optimizer(node: Mapping[str, Any]) -> None:
    """Refuse an optimizer that was told another recipe.

    Args:
        node: verl's McoreOptimizerConfig, ``actor_rollout_ref.actor.optim``, resolved.

    Raises:
        ConfigError: names the key.
    """
    found = (node.get("override_optimizer_config") or {}).get("fp8_recipe")
    if found != TRANSFORMER["fp8_recipe"]:
        path = "actor_rollout_ref.actor.optim.override_optimizer_config.fp8_recipe"
        raise ConfigError(f"{ASKED}, which sets {path}=blockwise", f"{path}={found}", f"remove the override of {path}")


def check_bf16_layers(role: str, node: Mapping[str, Any], wanted: Mapping[str, Any], layers: int) -> None:
    """Refuse the user's own bf16 layers where ``fp8.recipe.exclude`` says otherwise (the rollout would not know), and
    more at one end than a pipeline stage has, which Megatron refuses in its workers.

    Args:
        role: ``actor`` or ``ref``.
        node: ``actor_rollout_ref.<role>.megatron``, resolved.
        wanted: of :func:`bf16_layers`.
        layers: of the decoder.

    Raises:
        ConfigError: names the key.
    """
    overrides = node.get("override_transformer_config") or {}
    for key in ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if key in overrides and overrides[key] != wanted.get(key):
            path = _path(role, f"override_transformer_config.{key}")
            asked = f"{ASKED}, whose bf16 layers fp8.recipe.exclude names"
            fix = f"remove {path} and set fp8.recipe.exclude, e.g. ['model.layers.0.*']"
            raise ConfigError(asked, f"{path}={overrides[key]}", fix)
    path = _path(role, "pipeline_model_parallel_size")
    stage = layers // (node.get("pipeline_model_parallel_size") or 1)
    if max((v for k, v in wanted.items() if k.startswith("num_")), default=0) > stage:
        found = f"more layers at one end than the {stage} of a stage, {path}={node['pipeline_model_parallel_size']}"
        raise ConfigError(f"fp8.recipe.exclude with {ASKED}", found, f"exclude fewer, or lower {path}")


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
