"""The linear layers of a Hugging Face model by name and shape, from its configuration alone, and how vLLM divides them."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch

from verl_fp8 import linear
from verl_fp8.errors import ConfigError
from verl_fp8.recipe import WHOLE, LayerFilter, fused_group

# vLLM's row-parallel linears of decoder layers (vllm/model_executor/models): their input is divided, not their output.
ROW_PARALLEL = frozenset({"o_proj", "down_proj", "out_proj", "dense"})

# verl's keys of a model that say which configuration it has.
MODEL_KEYS = ("path", "hf_config_path", "trust_remote_code", "override_config")


def linear_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of every linear layer (:func:`verl_fp8.linear.linear_shapes`) of the causal LM that ``config``
    describes; allocates nothing.

    Raises:
        ConfigError: not a causal LM, or one with fused experts in an unknown layout.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(
            "the linear layers of the causal language model at actor_rollout_ref.model.path",
            f"a {type(config).__name__}, which AutoModelForCausalLM does not build ({str(error).splitlines()[0]})",
            "use a text-only model, or remove +fp8",
        ) from error
    return linear.linear_shapes(model)


def load_config(model: Mapping[str, Any]) -> Any:
    """The Hugging Face configuration verl will build the model from.

    Args:
        model: :data:`MODEL_KEYS`, as under ``actor_rollout_ref.model``.
    """
    path = model.get("hf_config_path") or model["path"]
    overrides = model.get("override_config") or {}
    overrides = overrides.get("model_config", overrides)
    plain = {k: v for k, v in dict(overrides).items() if k != "attn_implementation"}
    return _load(str(path), bool(model.get("trust_remote_code", False)), json.dumps(plain, sort_keys=True, default=str))


@functools.lru_cache(maxsize=8)
def _load(path: str, trust_remote_code: bool, overrides: str) -> Any:
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    config = AutoConfig.from_pretrained(copy_to_local(path), trust_remote_code=trust_remote_code)
    for key, value in json.loads(overrides).items():
        setattr(config, key, value)
    return config


def split_layers(config: Any, layers: LayerFilter | None) -> tuple[tuple[str, ...], dict[str, str], dict[str, tuple[int, int]]]:
    """(converted names, kept name -> reason, name -> shape) for a model described by its configuration.

    Args:
        config: the Hugging Face configuration.
        layers: None for a run without FP8 layers (``fp8.mode=bf16``).

    Raises:
        ConfigError: nothing would be converted, or ``fp8.recipe.exclude`` is wrong.
    """
    shapes = linear_shapes(config)
    if layers is None:
        return (), dict.fromkeys(shapes, "fp8.mode=bf16"), shapes
    converted, kept = layers.split(shapes)
    if not converted:
        raise ConfigError(
            "FP8 linear layers (+fp8)",
            f"none of the {len(shapes)} linear layers of {type(config).__name__} would be converted "
            f"({', '.join(sorted(set(kept.values()))) or 'the model has no linear layer'})",
            "loosen fp8.recipe.exclude or remove +fp8",
        )
    return converted, kept, shapes


def check_tensor_parallel(
    config: Any,
    shapes: Mapping[str, tuple[int, int]],
    converted: tuple[str, ...],
    block: tuple[int, int],
    tp: int,
    *,
    expert_parallel: bool = False,
) -> None:
    """Refuse on the driver what vLLM refuses at load: a shard or fused part that is no multiple of the block.

    The rule is vLLM's (quantization/utils/fp8_utils.py, validate_fp8_block_shape). Of experts it refuses fewer: where a
    rank's part is ragged it refines the blocks (fused_moe/oracle/fp8.py, refine_fp8_moe_block_shape), and with them the
    groups of activations, so that the rollout would no longer compute what the trainer does.

    Args:
        config: the Hugging Face configuration.
        shapes: name -> (out, in) of every linear layer.
        converted: the FP8 ones.
        block: rows and columns of weights that share a scale.
        tp: ``rollout.tensor_model_parallel_size``.
        expert_parallel: whether vLLM gives whole experts to ranks instead of parts of each.

    Raises:
        ConfigError: names the layer, its size and the keys that resolve it.
    """
    rows, columns = (1 if side == WHOLE else side for side in block)
    last_of_group = {fused_group(name): name for name in converted if fused_group(name)}
    for name in converted:
        out, in_ = shapes[name]
        leaf = name.rpartition(".")[2]
        group = fused_group(name)
        if ".experts." in name:
            parts = 1 if expert_parallel else tp
            if leaf != "down_proj":
                _whole(name, "out_features", out, parts, rows, block)
            elif parts > 1:
                _whole(name, "in_features", in_, parts, columns, block)
        elif leaf in ROW_PARALLEL:
            if tp > 1:
                _whole(name, "in_features", in_, tp, columns, block)
        elif group is not None:
            parts = tp
            if leaf in ("k_proj", "v_proj"):
                # vLLM replicates key and value heads once there are fewer of them than ranks.
                parts = min(tp, getattr(config, "num_key_value_heads", tp))
            if tp > 1 or last_of_group[group] != name:
                _whole(name, "out_features", out, parts, rows, block)
        elif tp > 1:
            _whole(name, "out_features", out, tp, rows, block)


def _whole(name: str, what: str, size: int, parts: int, unit: int, block: tuple[int, int]) -> None:
    if size % (parts * unit) == 0:
        return
    shard = f"{size} / {parts} = {size / parts:g}" if parts > 1 else f"{size}"
    expert = ".experts." in name
    block = tuple("whole" if side == WHOLE else side for side in block)
    needs = "or vLLM would quantise in smaller blocks than the trainer" if expert else "as vLLM needs it"
    raise ConfigError(
        f"blocks of {block[0]}x{block[1]} with actor_rollout_ref.rollout.tensor_model_parallel_size={parts}"
        if parts > 1
        else f"blocks of {block[0]}x{block[1]}",
        f"{name} has {what} {shard}, no multiple of {unit}, {needs}",
        ("lower actor_rollout_ref.rollout.tensor_model_parallel_size, " if parts > 1 else "")
        + (f"set actor_rollout_ref.rollout.expert_parallel_size={parts}, " if expert and parts > 1 else "")
        + "set fp8.recipe.weight_block to a divisor (reference backend only), or keep the layer in bf16 with fp8.recipe.exclude",
    )
