"""What tests/trainer/test_engine_megatron.py asserts about one version of Megatron; runs over te_host.py, on real
wheels.

``core_checks`` needs megatron-core and TransformerEngine. ``engine_checks`` needs Megatron-Bridge too: verl's own
Megatron engine, ours over it, builds a real Megatron model from a checkpoint, on one rank, without its kernels.
Attention, norms and so a whole forward need a GPU; single linear layers run.

Run as a script: ``python megatron_checks.py TE_FOLDER MODELS MEGATRON_FOLDER...`` with MODELS a JSON list of folders,
empty for the core checks alone; prints one JSON object, check -> "ok" or what went wrong.
"""

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

import hosted
import te_host
import torch

from verl_fp8.errors import ConfigError, ContractError
from verl_fp8.numerics import quantize, quantize_triton
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.rules import megatron
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.trainer import megatron_environment

SETTINGS = Fp8Settings(mode="unified_megatron", recipe=Recipe(scale_format="fp32"), scale_format="fp32")
# The driver's test hands these on: what the group and fp8.recipe.exclude write into the two configurations.
WRITTEN = json.loads(os.environ.get("VERL_FP8_TEST_WRITTEN", "{}"))


def transformer_config(**kwargs):
    """Megatron's own TransformerConfig, of a small MoE, with its own checks."""
    from megatron.core.transformer import TransformerConfig

    shape = dict(
        num_layers=4, hidden_size=256, num_attention_heads=2, num_query_groups=2, num_moe_experts=8,
        moe_ffn_hidden_size=256, moe_grouped_gemm=True, add_bias_linear=False,
        moe_token_dispatcher_type="alltoall", bf16=True,
    )  # fmt: skip
    return TransformerConfig(**{**shape, **kwargs})


def raised(error, act, *args):
    """The message of an error that must come."""
    try:
        act(*args)
    except error as caught:
        return str(caught)
    raise AssertionError(f"no {error.__name__}")


def check_core_symbols():
    """Every symbol of megatron-core and of verl's engine over it, as the table has it."""
    from verl_fp8.upstream import symbols_megatron
    from verl_fp8.upstream.contract import check

    for symbol in symbols_megatron.SYMBOLS:
        check(symbol)


def check_core_keys():
    """Megatron's configurations take every key we write, by their own __post_init__, and hold it afterwards."""
    from megatron.core.optimizer import OptimizerConfig

    for written in WRITTEN["transformer"]:
        config = transformer_config(**written)
        assert {k: getattr(config, k) for k in written} == written
        assert {k: written[k] for k in megatron.TRANSFORMER} == megatron.TRANSFORMER
    optimizer = OptimizerConfig(bf16=True, **WRITTEN["optimizer"])
    assert optimizer.fp8_recipe == "blockwise"


def check_core_refused_keys_exist():
    """The keys refused beside ours are Megatron's: a renamed one would be let through."""
    from megatron.core.transformer import TransformerConfig

    known = {f.name for f in dataclasses.fields(TransformerConfig)}
    assert {"quant_recipe", "use_kitchen", "fp8_wgrad", "fp8_dot_product_attention", "fp4"} <= known
    assert megatron._PADDING <= known


def check_core_recipe():
    """The recipe Megatron builds is ours under the variables the driver sets, and is refused under others."""
    from megatron.core.fp8_utils import get_fp8_recipe

    from verl_fp8.trainer.engine_megatron import check_recipe

    config = transformer_config(**megatron.TRANSFORMER)
    assert (
        os.environ[megatron_environment.SCALES_VARIABLE]
        == "1"
        == megatron_environment.environment(SETTINGS)[megatron_environment.SCALES_VARIABLE]
    )
    assert type(get_fp8_recipe(config)).__name__ == "Float8BlockScaling"
    check_recipe(config, SETTINGS)
    other = dataclasses.replace(SETTINGS, recipe=Recipe(scale_format="pow2"))
    assert f"{megatron_environment.SCALES_VARIABLE}=0" in raised(ConfigError, check_recipe, config, other)
    other = dataclasses.replace(SETTINGS, recipe=Recipe(backward="high_precision"))
    assert f"{megatron_environment.BACKWARD_VARIABLE}=high_precision" in raised(
        ConfigError, check_recipe, config, other
    )
    for key, value in (("fp8_recipe", "delayed"), ("fp8", None), ("fp8_param", True)):
        wrong = transformer_config(**megatron.TRANSFORMER)
        setattr(wrong, key, value)
        assert f"{key}=" in raised(ContractError, check_recipe, wrong, SETTINGS)


def check_core_which_layers():
    """Megatron's context is FP8 for every decoder layer but those that ``bf16_layers`` writes."""
    from megatron.core.fp8_utils import get_fp8_context

    config = transformer_config(**WRITTEN["transformer"][1])  # the first and the last layer in bf16
    contexts = [
        isinstance(get_fp8_context(config, layer), contextlib.nullcontext) for layer in range(config.num_layers)
    ]
    assert contexts == [True, False, False, True]


def check_core_transformer_engine_reads_when_imported():
    """Why the driver sets the variables: setting one now changes no recipe any more."""
    from megatron.core.fp8_utils import get_fp8_recipe

    os.environ[megatron_environment.SCALES_VARIABLE] = "0"
    try:
        recipe = get_fp8_recipe(transformer_config(**megatron.TRANSFORMER))
        assert recipe.fp8_quant_fwd_weight.power_2_scale is False
    finally:
        os.environ[megatron_environment.SCALES_VARIABLE] = "1"


# --- verl's engine ---------------------------------------------------------------------------------------------------

MODELS: list[str] = []
ENGINES: dict[str, object] = {}


def engine(path: str):
    """Our engine as verl's worker builds it, in the reference policy's role: without optimizer and DDP, which need a
    GPU."""
    if path in ENGINES:
        return ENGINES[path]
    from driver import compose
    from omegaconf import open_dict
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry

    only_here = {"perform_initialization": "false", "gradient_accumulation_fusion": "false"}
    config = compose(
        f"actor_rollout_ref.model.path={path}", "model_engine=megatron",
        "+fp8=unified_megatron", "fp8.recipe.scale_format=fp32",
        *(f"+actor_rollout_ref.actor.megatron.override_transformer_config.{k}={v}" for k, v in only_here.items()),
        config_name="ppo_trainer",
    )  # fmt: skip
    ref = config.actor_rollout_ref.ref
    with open_dict(ref):  # as verl/workers/engine_workers.py does
        ref.ppo_mini_batch_size = 8
        for name in ("micro_batch_size", "micro_batch_size_per_gpu"):
            ref[f"ppo_{name}"] = ref.pop(f"log_prob_{name}") or 1
        ref.use_dynamic_bsz = ref.pop("log_prob_use_dynamic_bsz")
        ref.ppo_max_token_len_per_gpu = ref.pop("log_prob_max_token_len_per_gpu")
        ref.ppo_micro_batch_size = None
    role = omega_conf_to_dataclass(ref)
    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    model_config.model_type = "language_model"
    made = EngineRegistry.new(
        "language_model", role.engine.strategy, model_config=model_config, engine_config=role.engine,
        optimizer_config=role.optim, checkpoint_config=role.checkpoint,
    )  # fmt: skip
    made.initialize()
    ENGINES[path] = made
    return made


def split_by_the_bridge(made, tensor_of) -> dict[str, torch.Tensor]:
    """Checkpoint name -> its part of ``tensor_of(parameter)``, by Megatron-Bridge's own mapping of each fused
    weight."""
    found = {}
    for task in made.bridge.get_conversion_tasks(made.module):
        hf = task.mapping.hf_param
        for name in (hf,) if isinstance(hf, str) else hf.values():
            if name.removesuffix(".weight") in made._fp8_layers and name not in found:
                found |= task.mapping.megatron_to_hf(tensor_of(task.param_weight.data), task.megatron_module)
    return found


def check_engine_symbols():
    """Every symbol of Megatron-Bridge."""
    from verl_fp8.upstream import symbols_megatron

    symbols_megatron.require()


def check_engine_compares_its_layers():
    """It builds, and its own comparison finds FP8 exactly the filter's layers; the class is ours, over verl's."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    for path in MODELS:
        made = engine(path)
        assert type(made).__name__ == "Fp8MegatronEngineWithLMHead" and isinstance(made, MegatronEngineWithLMHead)
        assert set(made._fp8_modules) == set(made._fp8_layers) and len(made._fp8_layers) >= 14
        assert not any("lm_head" in n or n.endswith("mlp.gate") for n in made._fp8_layers)


def check_engine_refuses_another_set_of_layers():
    """A layer that the rollout runs in FP8 and Megatron in bf16, and the other way round, ends the run by name."""
    made = engine(MODELS[0])
    converted, names = frozenset(made._fp8_layers), frozenset({*made._fp8_layers, "lm_head"})
    made._compare(converted, names)
    name = "model.layers.1.mlp.down_proj"
    assert name in raised(ContractError, made._compare, converted - {name}, names)
    assert "lm_head" in raised(ContractError, made._compare, converted | {"lm_head"}, names)
    made.tf_config.first_last_layers_bf16 = True
    try:
        assert "model.layers." in raised(ContractError, made._compare, converted, names)
    finally:
        made.tf_config.first_last_layers_bf16 = False
    weight = made._fp8_modules[name].weight
    weight.data = weight.data.float()
    try:
        assert "bf16 parameters" in raised(ContractError, made._compare, converted, names)
    finally:
        weight.data = weight.data.bfloat16()


def check_engine_ships_transformer_engines_codes():
    """The sync's codes of q, k, v, gate, up and every expert are those of Megatron's fused tensors, block for block.

    TransformerEngine quantises the fused parameter; the bridge's own mapping then says which rows are whose.
    """
    from verl_fp8.numerics.quantize import QuantizedTensor
    from verl_fp8.sync.stream import SCALE_SUFFIX, codes_of_weight

    for path in MODELS:
        made = engine(path)
        sent = dict(made.get_per_tensor_param()[0])
        fused = split_by_the_bridge(made, lambda weight: codes_of_weight(weight, SETTINGS).dequantize())
        assert len(fused) == len(made._fp8_layers)
        for name, expected in fused.items():
            scale = sent[name.removesuffix(".weight") + SCALE_SUFFIX]
            assert sent[name].dtype == torch.float8_e4m3fn
            assert torch.equal(QuantizedTensor(sent[name], scale, (128, 128)).dequantize(), expected), name
        assert made._fp8_sync["fp8/sync_bytes_per_weight"] < 1.001


def check_engine_forward_is_watched():
    """A linear layer of the model under Megatron's context computes on those codes; outside of it the run ends."""
    from megatron.core.fp8_utils import get_fp8_context

    from verl_fp8.numerics.linear import fp8_linear_forward
    from verl_fp8.sync.stream import codes_of_weight

    made = engine(MODELS[0])
    name = "model.layers.1.self_attn.o_proj"
    module, watched = made._fp8_modules[name], made._fp8_modules
    x = torch.randn(128, 1, module.weight.shape[1]).bfloat16()
    made._fp8_modules = {name: module}
    try:
        with torch.no_grad():
            plain, _ = module(x)
            assert name in raised(ContractError, made._check_ran)
            with get_fp8_context(made.tf_config, 1):
                y, _ = module(x)
        made._check_ran()
        expected = fp8_linear_forward(x.view(128, -1), codes_of_weight(module.weight, SETTINGS), SETTINGS.recipe)
        assert torch.equal(y.view(128, -1), expected) and not torch.equal(y, plain)
        made.fp8 = dataclasses.replace(SETTINGS, recipe=Recipe(scale_format="pow2"))
        assert "power_2_scale" in raised(ContractError, made._check_ran)
    finally:
        made._fp8_modules, made.fp8 = watched, SETTINGS


class OnCPU(torch.overrides.TorchFunctionMode):
    """Tensors that Megatron asks for on "cuda" come on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def on_one_rank_without_a_gpu() -> None:
    """What Megatron and verl ask of the device and of the launcher."""
    card = type(
        "Card", (), {"multi_processor_count": 1, "major": 9, "minor": 0, "total_memory": 1 << 34, "name": "none"}
    )
    torch.cuda.current_device, torch.cuda.device_count = lambda: torch.device("cpu"), lambda: 1
    torch.cuda.get_device_properties, torch.cuda.get_device_capability = lambda *_: card, lambda *_: (9, 0)
    for name in ("set_device", "manual_seed", "manual_seed_all", "synchronize", "empty_cache", "set_rng_state"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.Stream = type("Stream", (), {})
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state, random._set_cuda_rng_state = (
        lambda *_, **__: torch.get_rng_state(),
        lambda *_, **__: None,
    )
    # The same bits (tests/numerics/triton_interpreted.py); Triton itself finds no card.
    quantize_triton.quantize = quantize.quantize
    OnCPU().__enter__()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "VERL_ENGINE_DEVICE": "cuda"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    te_host.load(sys.argv[1])
    sys.path[:0] = sys.argv[3:]
    sys.path.append(str(Path(__file__).parents[1]))  # for driver: site-packages has a package `tests` too
    MODELS += json.loads(sys.argv[2])
    on_one_rank_without_a_gpu()
    print(json.dumps(hosted.run(globals(), prefix="check_" if MODELS else "check_core")))
