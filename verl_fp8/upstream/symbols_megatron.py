"""What verl_fp8.trainer.engine_megatron relies on in Megatron, and in verl's engine over it: the table's second part.

It stands apart from symbols.py because none of it can be imported where Megatron is not installed.
``tests/trainer/test_engine_megatron.py`` compares it with the Python of real wheels.
"""

import functools

from verl_fp8.upstream.contract import check
from verl_fp8.upstream.symbols import Symbol, of

_ENGINE = "verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead"
_TASK = "megatron.bridge.models.conversion.model_bridge.WeightConversionTask"


_engine, _rules = of("trainer.engine_megatron"), of("rules.megatron")

# fmt: off
SYMBOLS: tuple[Symbol, ...] = (
    _engine(_ENGINE, "base class", "model_config", "engine_config", "optimizer_config", "checkpoint_config",
            attributes=("tf_config", "module", "bridge", "model_config", "engine_config")),
    _engine(f"{_ENGINE}.initialize", "the layers are compared after it"),
    _engine(f"{_ENGINE}.forward_backward_batch", "what ran is compared after it", "data", "loss_function",
            "forward_only"),
    _engine("megatron.core.fp8_utils.get_fp8_recipe", "the recipe as Megatron builds it", "config"),
    _engine("megatron.core.fp8_utils.is_first_last_bf16_layer", "which decoder layers stay in bf16", "config",
            "layer_no"),
    _engine("megatron.core.fp8_utils.is_float8tensor", "parameters must be bf16", "tensor"),
    _rules("megatron.core.transformer.TransformerConfig", "the keys the group sets", "fp8", "fp8_recipe", "fp8_param",
           "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", forwarded=True),
)
BRIDGE: tuple[Symbol, ...] = (
    _engine("megatron.bridge.AutoBridge.get_conversion_tasks", "Megatron's name of each layer", "megatron_model"),
    _engine(_TASK, "one parameter's two names", "global_param_name", "mapping", "megatron_module", "param_weight",
            forwarded=True),
)
# fmt: on


@functools.cache
def require() -> None:
    """Compare all of it with what is installed; once a process.

    Raises:
        ContractError: the first entry that is not as relied on.
    """
    for symbol in (*SYMBOLS, *BRIDGE):
        check(symbol)
