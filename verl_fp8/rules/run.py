"""Everything that can be judged from the composed configuration, judged on the driver before Ray starts.

``validate_run`` is what verl's own ``validate_config`` reaches through the actor's configuration class, and what
``verl-fp8 check`` calls: one set of rules. Every refusal says what was asked, what was found and which key fixes it.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fp8.errors import ConfigError
from verl_fp8.layers.shapes import load_config, split_layers
from verl_fp8.rollout.arguments import EXTENSION, fp8_arguments
from verl_fp8.rollout.environment import environment
from verl_fp8.rules import fill, megatron, resume
from verl_fp8.rules.correction import check_correction
from verl_fp8.rules.fill import set_environment
from verl_fp8.rules.groups import GROUPS, check_fields, check_groups, check_nodes, check_vllm_arguments, targets_of
from verl_fp8.rules.refuse import get, number, refuse
from verl_fp8.rules.tensor_parallel import check_tensor_parallel
from verl_fp8.switches.hardware import probe, refuse_whole_sides, resolve_backend, resolve_rollout_kernel
from verl_fp8.switches.settings import CorrectionSettings, Fp8Settings
from verl_fp8.trainer import megatron_environment
from verl_fp8.trainer.exact import check_config
from verl_fp8.upstream.contract import require_versions

# What the switches have been tried with: verl's trainer modes and rollout engines.
FP8_MODES = ("sync", "colocate_async")
MODES = (*FP8_MODES, "separate_async")
ROLLOUT = "vllm"


@dataclass(frozen=True)
class RunSummary:
    """What a valid configuration will do: the parsed groups, the layers, and what ``auto`` is on this machine.

    ``backend`` and ``kernel`` are None where this machine is not the one that will train (a driver without a GPU).
    """

    fp8: Fp8Settings | None
    correction: CorrectionSettings | None
    converted: tuple[str, ...] = ()
    kept: dict[str, str] | None = None
    backend: str | None = None
    kernel: str | None = None


def validate_run(config: DictConfig) -> RunSummary:
    """Check a composed verl configuration, and write vLLM's environment into ``ray_kwargs.ray_init.runtime_env``.

    Raises:
        ConfigError: the first contradiction found.
        ContractError: an unsupported version of verl or vLLM.
    """
    check_groups(config)
    fp8_node, correction_node = get(config, "fp8"), get(config, "is_correction")
    if fp8_node is None and correction_node is None:
        return RunSummary(None, None)
    fp8 = None if fp8_node is None else Fp8Settings.parse(fp8_node)
    correction = None if correction_node is None else CorrectionSettings.parse(correction_node)
    switches = {"fp8": fp8 and fp8.mode, "is_correction": correction and correction.method}
    asked = " ".join(f"+{group}={choice}" for group, choice in switches.items() if choice)
    require_versions(vllm=fp8 is not None)
    _check_shared(config, asked)
    check_fields(config)
    check_vllm_arguments(config, asked)
    if correction is not None:
        check_correction(config, correction)
    if fp8 is None:
        return RunSummary(None, correction)
    _check_engine(config, fp8, asked)
    check_nodes(config, "megatron" if fp8.megatron else "fsdp_config")
    _check_rollout(config, fp8, asked)
    backend, kernel = _check_hardware(config, fp8)
    resume.check_resume(config.trainer, fp8, known=backend is not None)
    converted, kept = _check_model(config, fp8)
    return RunSummary(fp8, correction, converted, kept, backend, kernel)


def validate_entry(config: DictConfig, task_runner: Any) -> None:
    """:func:`validate_run` for a configuration that an entry point hands to verl's ``run_ppo``.

    Args:
        task_runner: the Ray actor class that will train.

    Raises:
        ConfigError: a switch, and another task runner than verl.trainer.main_ppo's, which brings a trainer of its own.
    """
    from verl.trainer.main_ppo import TaskRunnerV1

    switches = [f"+{group}" for group in GROUPS if get(config, group) is not None]
    if switches and task_runner is not TaskRunnerV1:
        name = getattr(getattr(task_runner, "__ray_metadata__", None), "class_name", str(task_runner))
        raise ConfigError(
            " ".join(switches),
            f"the task runner {name}, whose trainer the switches do not reach",
            "start python -m verl.trainer.main_ppo; trainer.v1.trainer_mode=colocate_async trains asynchronously",
        )
    validate_run(config)


def _check_shared(config: DictConfig, asked: str) -> None:
    if not get(config, "trainer.use_v1", True):
        refuse(asked, config, "trainer.use_v1", ", verl's deprecated trainer", "set trainer.use_v1=true")
    mode, modes = get(config, "trainer.v1.trainer_mode", "sync"), FP8_MODES if get(config, "fp8") is not None else MODES
    if mode not in modes:
        refuse(
            asked,
            config,
            "trainer.v1.trainer_mode",
            f"; tried with {', '.join(modes)}",
            f"set trainer.v1.trainer_mode={modes[0]}",
        )
    if get(config, "actor_rollout_ref.rollout.name") != ROLLOUT:
        path = "actor_rollout_ref.rollout.name"
        refuse(
            asked, config, path, ", whose quantiser and log-probs the switches do not reach", f"set {path}={ROLLOUT}"
        )
    if get(config, "actor_rollout_ref.rollout.mode", "async") != "async":
        path = "actor_rollout_ref.rollout.mode"
        refuse(asked, config, path, ", which verl 0.9 no longer has", f"set {path}=async")
    for path, target in targets_of("is_correction/wiring").items():
        if get(config, path) != target:
            why = f" instead of {target}, so the switches would not act"
            refuse(asked, config, path, why, f"select the groups after ppo_trainer, and remove any override of {path}")


def _check_engine(config: DictConfig, fp8: Fp8Settings, asked: str) -> None:
    strategy = get(config, "actor_rollout_ref.actor.strategy")
    engine = get(config, "model_engine", "dp")
    node, wanted, other = (
        ("megatron", "megatron", "unified") if fp8.megatron else ("fsdp_config", "fsdp2", "unified_megatron")
    )
    if (engine == "megatron") != fp8.megatron or engine not in ("dp", "megatron"):
        fix = f"use +fp8={other}, or " if engine in ("dp", "megatron") else ""
        fix += "set model_engine=megatron" if fp8.megatron else f"remove model_engine={engine}: this mode is for FSDP2"
        raise ConfigError(asked, f"model_engine={engine}", fix)
    if strategy != wanted:
        refuse(asked, config, "actor_rollout_ref.actor.strategy", "", f"set actor_rollout_ref.actor.strategy={wanted}")
    engine_file = "fp8/unified_megatron" if fp8.megatron else "fp8/wiring_fsdp2"
    for path, target in {**targets_of("fp8/wiring"), **targets_of(engine_file)}.items():
        if get(config, path) != target:
            refuse(asked, config, path, f" instead of {target}", f"remove the override of {path}")
    ref = get(config, "actor_rollout_ref.ref.strategy", strategy)
    if ref != wanted:
        refuse(
            asked,
            config,
            "actor_rollout_ref.ref.strategy",
            "",
            f"set actor_rollout_ref.ref.strategy={wanted}, or remove it",
        )
    for path in ("model.lora_rank", "model.lora.rank"):
        if number(config, f"actor_rollout_ref.{path}", 0) > 0:
            refuse(
                asked,
                config,
                f"actor_rollout_ref.{path}",
                ": LoRA adapters",
                f"set actor_rollout_ref.{path}=0 or remove +fp8",
            )
    if get(config, "actor_rollout_ref.model.lora_adapter_path"):
        refuse(asked, config, "actor_rollout_ref.model.lora_adapter_path", "", "remove lora_adapter_path or +fp8")
    if get(config, "actor_rollout_ref.actor.qat.enable", False):
        refuse(asked, config, "actor_rollout_ref.actor.qat.enable", ", another quantiser", "set it to false")
    if get(config, "actor_rollout_ref.model.mtp.enable", False):
        refuse(
            asked,
            config,
            "actor_rollout_ref.model.mtp.enable",
            ": not tried with FP8 weights",
            "set it to false or remove +fp8",
        )
    if fp8.megatron:
        megatron.check_settings(fp8)
        for role in megatron.ROLES:
            megatron.check_engine(role, _megatron_node(config, role))
        megatron.check_optimizer(OmegaConf.to_container(config.actor_rollout_ref.actor.optim, resolve=True))
    else:
        _check_fsdp(config, asked)


def _megatron_node(config: DictConfig, role: str) -> dict[str, Any]:
    return OmegaConf.to_container(config.actor_rollout_ref[role].megatron, resolve=True)


def _check_fsdp(config: DictConfig, asked: str) -> None:
    for role in ("actor", "ref"):
        base = f"actor_rollout_ref.{role}.fsdp_config"
        if get(config, f"{base}.qat.enable", False):
            refuse(asked, config, f"{base}.qat.enable", ", another quantiser", f"set {base}.qat.enable=false")
        dtype = get(config, f"{base}.mixed_precision.param_dtype", "bf16")
        if dtype not in ("bf16", "bfloat16"):
            refuse(
                asked, config, f"{base}.mixed_precision.param_dtype", "; the recipe quantises bf16", "set it to bf16"
            )
        if get(config, f"{base}.dtype", "bfloat16") != "bfloat16":
            refuse(asked, config, f"{base}.dtype", "; the recipe quantises bf16", f"set {base}.dtype=bfloat16")


def _check_rollout(config: DictConfig, fp8: Fp8Settings, asked: str) -> None:
    base = "actor_rollout_ref.rollout"
    wanted = {
        "quantization": (
            (None, "fp8.mode=bf16 has no FP8 layer")
            if fp8.layer_filter is None
            else ("fp8", "the rollout would not be the recipe's FP8")
        ),
        "dtype": ("bfloat16", "activations reach the quantiser in bf16"),
        "calculate_log_probs": (True, "the mismatch could not be seen"),
    }
    for key, (value, why) in wanted.items():
        if get(config, f"{base}.{key}") != value:
            shown = {True: "true", None: "null"}.get(value, value)
            refuse(asked, config, f"{base}.{key}", f": {why}", f"set {base}.{key}={shown}, or remove the override")
    if get(config, f"{base}.quantization_config_file"):
        refuse(
            asked, config, f"{base}.quantization_config_file", "", "remove it; fp8.recipe.* describes the quantisation"
        )
    if get(config, f"{base}.qat.enable", False):
        refuse(asked, config, f"{base}.qat.enable", ", another quantiser", f"set {base}.qat.enable=false")
    if get(config, f"{base}.disaggregation.enabled", False):
        refuse(
            asked,
            config,
            f"{base}.disaggregation.enabled",
            ": not tried with FP8 weights",
            f"set {base}.disaggregation.enabled=false",
        )
    backend = get(config, f"{base}.checkpoint_engine.backend", "naive")
    if backend == "delta_sharded":
        refuse(
            asked, config, f"{base}.checkpoint_engine.backend", ", which ships bf16 deltas", "set it to naive or nccl"
        )
    extension = get(config, f"{base}.engine_kwargs.vllm.worker_extension_cls")
    if extension != EXTENSION:
        refuse(
            asked,
            config,
            f"{base}.engine_kwargs.vllm.worker_extension_cls",
            "",
            f"remove the override ({EXTENSION} is needed)",
        )


def _check_hardware(config: DictConfig, fp8: Fp8Settings) -> tuple[str | None, str | None]:
    """(the trainer's backend, vLLM's kernel) on this machine, or None for both where it cannot be told."""
    machine = probe()
    if fp8.megatron:
        megatron.check_machine(fp8, machine, get(config, "trainer.device"))
        asked = f"fp8.recipe.backward={fp8.recipe.backward} with {fp8.recipe.scale_format} scales"
        set_environment(
            config, {megatron_environment.BACKWARD_VARIABLE: None, **megatron_environment.environment(fp8)}, asked
        )
    if get(config, "trainer.device") != "cpu":
        if fp8.recipe.weights != "block":
            refuse_whole_sides(fp8.recipe, f"fp8.mode={fp8.mode}")
        if machine.capability is None:
            return None, None
    if fp8.layer_filter is None:
        return "bf16", "bf16"
    backend = (
        "bf16"
        if fp8.mode == "rollout"
        else resolve_backend("reference" if fp8.exact else fp8.backend, fp8.recipe, machine)
    )
    kernel = resolve_rollout_kernel(fp8.rollout_kernel, fp8.recipe, machine)
    asked = f"fp8.rollout_kernel={fp8.rollout_kernel} with {fp8.recipe.scale_format} scales"
    set_environment(config, environment(fp8, machine), asked)
    return backend, kernel


def _check_model(config: DictConfig, fp8: Fp8Settings) -> tuple[tuple[str, ...], dict[str, str]]:
    node = OmegaConf.to_container(config.actor_rollout_ref.rollout.fp8_model, resolve=True)
    key = "hf_config_path" if node["hf_config_path"] else "path"
    if not isinstance(node[key], str):
        raise ConfigError(
            f"actor_rollout_ref.model.{key}={node[key]!r}",
            "not a path",
            f"set actor_rollout_ref.model.{key} to a model",
        )
    try:
        hf_config = load_config(node)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the layers of actor_rollout_ref.model.{key}={node[key]}",
            f"no readable model configuration there ({str(error).splitlines()[0]})",
            f"set actor_rollout_ref.model.{key} to a model",
        ) from error
    if getattr(hf_config, "quantization_config", None):
        raise ConfigError(
            f"FP8 training of the bf16 model at actor_rollout_ref.model.{key}={node[key]}",
            "an already quantised one (quantization_config in its configuration)",
            f"set actor_rollout_ref.model.{key} to the unquantised model",
        )
    converted, kept, shapes = split_layers(hf_config, fp8.layer_filter)
    experts = next((name for name in converted if ".experts." in name), None)
    if fp8.recipe.weights != "block" and experts is not None:
        raise ConfigError(
            f"fp8.recipe.weights={fp8.recipe.weights}",
            f"{experts}: experts are quantised in blocks only",
            "keep the experts in bf16: fp8.recipe.exclude=['*.mlp.experts.*'], or set fp8.recipe.weights=block",
        )
    tp = get(config, "actor_rollout_ref.rollout.tensor_model_parallel_size", 1)
    if type(tp) is not int or tp < 1:
        path = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        refuse("+fp8 with tensor parallelism", config, path, ", not a positive whole number", f"set {path} to one")
    if fp8.layer_filter is None:
        _check_bf16(fp8)
    if fp8.exact:
        _check_exact(config, fp8, hf_config, tp)
    # verl passes it on as vLLM's --enable-expert-parallel, over all ranks; its own dataclass asserts the product in a worker.
    path = "actor_rollout_ref.rollout.expert_parallel_size"
    whole, ranks = number(config, path, 1) > 1, tp * number(config, "actor_rollout_ref.rollout.data_parallel_size", 1)
    if whole and get(config, path) != ranks:
        refuse(
            "+fp8 with expert parallelism",
            config,
            path,
            f", beside {ranks} ranks of one rollout (tensor times data parallel)",
            f"set {path}={ranks}, or 1",
        )
    check_tensor_parallel(hf_config, shapes, converted, fp8.recipe.weight_block, tp, expert_parallel=whole)
    if fp8.megatron:
        _check_megatron_layers(config, hf_config, shapes, converted, kept)
    kwargs = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm, resolve=True)
    fp8_arguments(OmegaConf.to_container(config.fp8, resolve=True), node, kwargs)
    return converted, kept


def _check_megatron_layers(
    config: DictConfig, hf_config: Any, shapes: Any, converted: tuple[str, ...], kept: dict[str, str]
) -> None:
    """Blocks must fall on shards, and what ``fp8.recipe.exclude`` keeps in bf16 is written into Megatron's own keys."""
    keys = fill.bf16_layers(hf_config.num_hidden_layers, converted, kept)
    for role in megatron.ROLES:
        node = _megatron_node(config, role)
        megatron.check_blocks(hf_config, shapes, converted, node)
        megatron.check_bf16_layers(role, node, keys, hf_config.num_hidden_layers)
    for key, value in keys.items():
        OmegaConf.update(
            config, f"actor_rollout_ref.actor.megatron.override_transformer_config.{key}", value, force_add=True
        )


def _check_bf16(fp8: Fp8Settings) -> None:
    """Without FP8 layers the keys that describe them would do nothing."""
    plain = Fp8Settings(mode="bf16")
    recipe, ours = fp8.recipe.to_dict(), plain.recipe.to_dict()
    keys = {f"recipe.{k}": (getattr(fp8.recipe, k), getattr(plain.recipe, k)) for k in ("weights", "activations")}
    keys |= {f"recipe.{k}": (v, ours[k]) for k, v in recipe.items() if k != "scale_format" and k in ours}
    keys |= {"recipe.exclude": (fp8.layers.exclude, ()), "recipe.scale_format": (fp8.scale_format, "auto")}
    keys |= {k: (getattr(fp8, k), getattr(plain, k)) for k in ("backend", "rollout_kernel", "weight_sync")}
    for key, (found, default) in keys.items():
        if found != default:
            raise ConfigError(
                "+fp8=bf16, which has no FP8 layer", f"fp8.{key}={found}", f"remove fp8.{key}, or use +fp8=unified"
            )


def _check_exact(config: DictConfig, fp8: Fp8Settings, hf_config: Any, tp: int) -> None:
    asked = "fp8.exact=true"
    check_config(hf_config)
    if fp8.mode != "unified":
        raise ConfigError(asked, f"fp8.mode={fp8.mode}: a bf16 trainer has other roundings", "use +fp8=unified")
    if fp8.backend not in ("auto", "reference"):
        raise ConfigError(asked, f"fp8.backend={fp8.backend}", "set fp8.backend=reference")
    if tp != 1:
        path = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        refuse(asked, config, path, ": partial sums would be rounded between ranks", f"set {path}=1")
    for path in ("actor_rollout_ref.model.use_liger", "actor_rollout_ref.model.use_fused_kernels"):
        if get(config, path, False):
            refuse(asked, config, path, ", which replaces operations the exact mode defines", f"set {path}=false")
