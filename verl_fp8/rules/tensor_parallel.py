"""How vLLM divides the layers over its ranks, and whether blocks fall on the cuts."""

from collections.abc import Mapping
from typing import Any

from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import fused_group
from verl_fp8.numerics.recipe import WHOLE

# vLLM's row-parallel linears of decoder layers (vllm/model_executor/models): their input is divided, not their output.
ROW_PARALLEL = frozenset({"o_proj", "down_proj", "out_proj", "dense"})


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
        + "set fp8.recipe.weight_block to a divisor (reference backend only), "
        + "or keep the layer in bf16 with fp8.recipe.exclude",
    )
