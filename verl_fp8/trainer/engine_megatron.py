"""verl's Megatron engine in blockwise FP8, with the FP8 weight sync. Can be imported only where Megatron is installed.

Megatron itself trains in FP8 once its configuration says so (conf/fp8/unified_megatron.yaml). What is added: proof that
it does, or an error. After the model is built, the recipe as Megatron builds it is compared with ours, and the layers
that TransformerEngine computes with the layers of the filter, name by name. After the first batch each of them must
have run in FP8 by that recipe.

The weight sync quantises what Megatron-Bridge exports: the bf16 parameters, which TransformerEngine quantises in its
next forward (anew in the first micro-batch of every batch). The codes are the same, since blocks fall on shards
(verl_fp8.rules.megatron.check_blocks). Optimizer state and fp32 main parameters play no part: Megatron rounds them to
these bf16 parameters at the end of each step.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from megatron.core import fp8_utils
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from verl_fp8.errors import ConfigError, ContractError
from verl_fp8.layers.shapes import MODEL_KEYS, load_config, split_layers
from verl_fp8.switches.hardware import probe
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.trainer.convert import ConversionReport
from verl_fp8.trainer.engine_fsdp import Fp8SyncMixin
from verl_fp8.trainer.megatron_environment import ASKED, BACKWARD_VARIABLE, SCALES_VARIABLE, environment
from verl_fp8.trainer.te import check_te_recipe, is_te_module
from verl_fp8.upstream import symbols_megatron


def local_layers(tasks: Iterable, names: frozenset[str]) -> Iterator[tuple[str, str, torch.nn.Module, torch.Tensor]]:
    """(name in the checkpoint, Megatron's name, module, parameter) of each linear layer on this rank.

    Args:
        tasks: Megatron-Bridge's, one ``WeightConversionTask`` a parameter of any rank; None where it has no mapping.
        names: the linear layers by their names in the checkpoint; fused ones appear once for each part.
    """
    for task in tasks:
        if task is None or task.megatron_module is None:
            continue
        hf = task.mapping.hf_param
        for name in (hf,) if isinstance(hf, str) else hf.values():
            layer = name.removesuffix(".weight")
            if name.endswith(".weight") and layer in names:
                yield layer, task.global_param_name, task.megatron_module, task.param_weight


def in_fp8(tf_config, name: str, module: torch.nn.Module) -> bool:
    """Whether Megatron will compute a module in FP8.

    Args:
        tf_config: Megatron's TransformerConfig.
        name: global name of its parameter, ``decoder.layers.3.mlp.linear_fc2.weight``.
        module: the module.
    """
    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    if found is None or not is_te_module(module):
        return False
    return not fp8_utils.is_first_last_bf16_layer(tf_config, int(found[1]))


def check_recipe(tf_config, fp8: Fp8Settings) -> None:
    """Compare what Megatron was configured with, and the recipe it builds from that, with ours.

    Raises:
        ConfigError: the environment of this process makes another recipe.
        ContractError: the configuration did not arrive.
    """
    wanted = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False, "bf16": True}
    for key, value in wanted.items():
        if getattr(tf_config, key) != value:
            fix = "report the versions of verl and Megatron"
            raise ContractError(f"Megatron's {key}={value}", f"{getattr(tf_config, key)}", fix)
    try:
        check_te_recipe(fp8_utils.get_fp8_recipe(tf_config), fp8.recipe)
    except ContractError as error:
        needed = {BACKWARD_VARIABLE: "(unset)", **environment(fp8)}
        raise ConfigError(
            f"{error.asked}, by {', '.join(f'{name}={needed[name]}' for name in (SCALES_VARIABLE, BACKWARD_VARIABLE))}",
            f"{error.found} in this worker",
            "unset both variables on every node; the driver hands them on by ray_kwargs.ray_init.runtime_env.env_vars",
        ) from error


class Fp8MegatronEngineWithLMHead(Fp8SyncMixin, MegatronEngineWithLMHead):
    """verl's Megatron engine for a language model, its decoder layers in blockwise FP8."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        symbols_megatron.require()
        self.fp8 = engine_config.settings(probe().capability)
        self._fp8_modules: dict[str, torch.nn.Module] = {}
        self._fp8_ran = False
        object.__setattr__(engine_config, "strategy", "megatron")
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def initialize(self):
        """verl's, then the comparison of recipe and layers.

        Raises:
            ConfigError: see :func:`check_recipe`.
            ContractError: another set of layers than the filter's, or parameters that are not bf16.
        """
        super().initialize()
        check_recipe(self.tf_config, self.fp8)
        # As driver and rollout read it: verl's own object asks for an attention that only matters where HF computes.
        hf_config = load_config({key: getattr(self.model_config, key) for key in MODEL_KEYS})
        converted, kept, shapes = split_layers(hf_config, self.fp8.layer_filter)
        self._fp8_layers = converted
        self._fp8_modules = self._compare(frozenset(converted), frozenset(shapes))
        self._fp8_ran = False
        if torch.distributed.get_rank() == 0:
            role = "reference policy" if self.engine_config.forward_only else "actor"
            summary = ConversionReport(converted, kept, len(shapes)).summary()
            print(f"{summary} [{role}, Megatron, recipe {self.fp8.recipe.digest()}]", flush=True)

    def _compare(self, converted: frozenset[str], names: frozenset[str]) -> dict[str, torch.nn.Module]:
        modules = {}
        for layer, megatron_name, module, weight in local_layers(self.bridge.get_conversion_tasks(self.module), names):
            actual = in_fp8(self.tf_config, megatron_name, module)
            if actual != (layer in converted):
                raise ContractError(
                    f"{layer} in {'FP8' if layer in converted else 'bf16'}, as the rollout runs it",
                    f"{megatron_name}, a {type(module).__name__}, in {'FP8' if actual else 'bf16'}",
                    "report the model and the versions of verl and Megatron",
                )
            if actual and (weight.dtype != torch.bfloat16 or fp8_utils.is_float8tensor(weight)):
                found = f"{type(weight).__name__} of {weight.dtype}"
                raise ContractError(f"bf16 parameters ({megatron_name})", found, "set fp8_param=false")
            if actual:
                modules[layer] = module
        if not modules:
            found = f"none of the {len(converted)} FP8 layers on this rank"
            raise ContractError(ASKED, found, "report the model and the versions of verl and Megatron")
        return modules

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        """verl's; after the first batch every FP8 layer of this rank must have run in FP8."""
        output = super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        if not self._fp8_ran:
            self._check_ran()
            self._fp8_ran = True
        return output

    def _check_ran(self) -> None:
        for name, module in self._fp8_modules.items():
            if not module.fp8:
                found = "its forward ran outside of TransformerEngine's autocast"
                raise ContractError(f"{name} in FP8", found, "report the versions of verl and Megatron")
            check_te_recipe(module.fp8_meta["recipe"], self.fp8.recipe)
