"""Everything that can be judged from the composed configuration, judged on the driver before Ray starts.

``validate_run`` is what verl's own ``validate_config`` reaches through the actor's configuration class, and what
``verl-fp8 check`` calls: one set of rules. Every refusal says what was asked, what was found and which key fixes it.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fp8.ais import AISConfig
from verl_fp8.contract import require_versions
from verl_fp8.errors import ConfigError
from verl_fp8.layout import check_tensor_parallel, load_config, split_layers
from verl_fp8.settings import CorrectionSettings, Fp8Settings
from verl_fp8.vllm_arguments import EXTENSION, fp8_arguments

# Estimators that turn group rewards into one advantage a response, as the paper's experiments do.
GRPO_FAMILY = ("grpo", "grpo_vectorized")

TARGETS = {
    "actor_rollout_ref.actor._target_": "verl_fp8.config.actor_config",
    "actor_rollout_ref.model._target_": "verl_fp8.config.ModelConfig",
}
FP8_TARGETS = {
    "actor_rollout_ref.actor.fsdp_config._target_": "verl_fp8.config.Fp8EngineConfig",
    "actor_rollout_ref.rollout._target_": "verl_fp8.config.Fp8RolloutConfig",
    "actor_rollout_ref.ref.fsdp_config._target_": "verl_fp8.config.Fp8EngineConfig",
}


@dataclass(frozen=True)
class RunSummary:
    """What a valid configuration will do: the parsed groups and the layers."""

    fp8: Fp8Settings | None
    correction: CorrectionSettings | None
    converted: tuple[str, ...] = ()
    kept: dict[str, str] | None = None


def get(config: DictConfig, path: str, default: Any = None) -> Any:
    """A value by dotted path, interpolations resolved, ``default`` where it is absent or null."""
    value = OmegaConf.select(config, path, default=default)
    return default if value is None else value


def validate_run(config: DictConfig) -> RunSummary:
    """Check a composed verl configuration.

    Raises:
        ConfigError: the first contradiction found.
        ContractError: an unsupported version of verl or vLLM.
    """
    fp8_node, correction_node = get(config, "fp8"), get(config, "is_correction")
    if fp8_node is None and correction_node is None:
        return RunSummary(None, None)
    fp8 = None if fp8_node is None else Fp8Settings.parse(fp8_node)
    correction = None if correction_node is None else CorrectionSettings.parse(correction_node)
    asked = " ".join(
        [f"+fp8={fp8.mode}"] * (fp8 is not None) + [f"+is_correction={correction.method}"] * (correction is not None)
    )
    require_versions(vllm=fp8 is not None)
    _check_shared(config, asked)
    if correction is not None:
        _check_correction(config, correction)
    if fp8 is None:
        return RunSummary(None, correction)
    _check_engine(config, asked)
    _check_rollout(config, asked)
    converted, kept = _check_model(config, fp8)
    return RunSummary(fp8, correction, converted, kept)


def _refuse(asked: str, config: DictConfig, path: str, why: str, fix: str) -> None:
    raise ConfigError(asked, f"{path}={get(config, path)}{why}", fix)


def _check_shared(config: DictConfig, asked: str) -> None:
    if not get(config, "trainer.use_v1", True):
        _refuse(asked, config, "trainer.use_v1", ", verl's deprecated trainer", "set trainer.use_v1=true")
    for path, target in TARGETS.items():
        if get(config, path) != target:
            _refuse(asked, config, path, f" instead of {target}, so the switches would not act", f"remove the override of {path}")


def _check_engine(config: DictConfig, asked: str) -> None:
    strategy = get(config, "actor_rollout_ref.actor.strategy")
    if get(config, "actor_rollout_ref.actor.megatron") is not None:
        raise ConfigError(asked, "model_engine=megatron", "remove model_engine=megatron: these modes are for FSDP2")
    if strategy != "fsdp2":
        _refuse(asked, config, "actor_rollout_ref.actor.strategy", "", "set actor_rollout_ref.actor.strategy=fsdp2")
    for path, target in FP8_TARGETS.items():
        if get(config, path) != target:
            _refuse(asked, config, path, f" instead of {target}", f"remove the override of {path}")
    ref = get(config, "actor_rollout_ref.ref.strategy", strategy)
    if ref != "fsdp2":
        _refuse(asked, config, "actor_rollout_ref.ref.strategy", "", "set actor_rollout_ref.ref.strategy=fsdp2, or remove it")
    for path in ("model.lora_rank", "model.lora.rank"):
        if get(config, f"actor_rollout_ref.{path}", 0) > 0:
            _refuse(asked, config, f"actor_rollout_ref.{path}", ": LoRA adapters", f"set actor_rollout_ref.{path}=0 or remove +fp8")
    if get(config, "actor_rollout_ref.model.lora_adapter_path"):
        _refuse(asked, config, "actor_rollout_ref.model.lora_adapter_path", "", "remove lora_adapter_path or +fp8")
    for role in ("actor", "ref"):
        base = f"actor_rollout_ref.{role}.fsdp_config"
        if get(config, f"{base}.qat.enable", False):
            _refuse(asked, config, f"{base}.qat.enable", ", another quantiser", f"set {base}.qat.enable=false")
        dtype = get(config, f"{base}.mixed_precision.param_dtype", "bf16")
        if dtype not in ("bf16", "bfloat16"):
            _refuse(asked, config, f"{base}.mixed_precision.param_dtype", "; the recipe quantises bf16", "set it to bf16")
        if get(config, f"{base}.dtype", "bfloat16") != "bfloat16":
            _refuse(asked, config, f"{base}.dtype", "; the recipe quantises bf16", f"set {base}.dtype=bfloat16")
    if get(config, "actor_rollout_ref.actor.qat.enable", False):
        _refuse(asked, config, "actor_rollout_ref.actor.qat.enable", ", another quantiser", "set it to false")
    if get(config, "actor_rollout_ref.model.mtp.enable", False):
        _refuse(asked, config, "actor_rollout_ref.model.mtp.enable", ": not tried with FP8 weights", "set it to false or remove +fp8")


def _check_rollout(config: DictConfig, asked: str) -> None:
    base = "actor_rollout_ref.rollout"
    wanted = {
        "name": ("vllm", "the FP8 rollout is vLLM's"),
        "quantization": ("fp8", "the rollout would not be the recipe's FP8"),
        "dtype": ("bfloat16", "activations reach the quantiser in bf16"),
        "calculate_log_probs": (True, "the mismatch could not be seen"),
    }
    for key, (value, why) in wanted.items():
        if get(config, f"{base}.{key}") != value:
            shown = str(value).lower() if isinstance(value, bool) else value
            _refuse(asked, config, f"{base}.{key}", f": {why}", f"set {base}.{key}={shown}, or remove the override")
    if get(config, f"{base}.quantization_config_file"):
        _refuse(asked, config, f"{base}.quantization_config_file", "", "remove it; fp8.recipe.* describes the quantisation")
    if get(config, f"{base}.qat.enable", False):
        _refuse(asked, config, f"{base}.qat.enable", ", another quantiser", f"set {base}.qat.enable=false")
    backend = get(config, f"{base}.checkpoint_engine.backend", "naive")
    if backend == "delta_sharded":
        _refuse(asked, config, f"{base}.checkpoint_engine.backend", ", which ships bf16 deltas", "set it to naive or nccl")
    extension = get(config, f"{base}.engine_kwargs.vllm.worker_extension_cls")
    if extension != EXTENSION:
        _refuse(asked, config, f"{base}.engine_kwargs.vllm.worker_extension_cls", "", f"remove the override ({EXTENSION} is needed)")


def _check_model(config: DictConfig, fp8: Fp8Settings) -> tuple[tuple[str, ...], dict[str, str]]:
    node = OmegaConf.to_container(config.actor_rollout_ref.rollout.fp8_model, resolve=True)
    try:
        hf_config = load_config(node)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the layers of actor_rollout_ref.model.path",
            f"no readable model configuration at {node['path']} ({str(error).splitlines()[0]})",
            "set actor_rollout_ref.model.path to a model",
        ) from error
    converted, kept, shapes = split_layers(hf_config, fp8.layers)
    tp = get(config, "actor_rollout_ref.rollout.tensor_model_parallel_size", 1)
    check_tensor_parallel(hf_config, shapes, converted, fp8.recipe.weight_block, tp)
    kwargs = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm, resolve=True)
    fp8_arguments(OmegaConf.to_container(config.fp8, resolve=True), node, kwargs)
    return converted, kept


def _check_correction(config: DictConfig, correction: CorrectionSettings) -> None:
    asked = f"+is_correction={correction.method}"
    rollout_is = get(config, "algorithm.rollout_correction.rollout_is")
    if rollout_is is not None:
        _refuse(asked, config, "algorithm.rollout_correction.rollout_is", ", a second correction of the same ratio",
                "set algorithm.rollout_correction.rollout_is=null, or remove is_correction")
    if correction.method == "none":
        return
    AISConfig(**correction.parameters)
    if get(config, "algorithm.rollout_correction.bypass_mode", False):
        _refuse(asked, config, "algorithm.rollout_correction.bypass_mode",
                ": the trainer's log-probs are the rollout's, every ratio would be 1", "set it to false")
    if get(config, "actor_rollout_ref.actor.use_rollout_log_probs", False):
        _refuse(asked, config, "actor_rollout_ref.actor.use_rollout_log_probs", ": every ratio would be 1", "set it to false")
    if not get(config, "actor_rollout_ref.rollout.calculate_log_probs", False):
        _refuse(asked, config, "actor_rollout_ref.rollout.calculate_log_probs", "",
                "set actor_rollout_ref.rollout.calculate_log_probs=true")
    estimator = get(config, "algorithm.adv_estimator")
    if str(estimator) not in GRPO_FAMILY:
        _refuse(asked, config, "algorithm.adv_estimator", f"; AIS is tested with {', '.join(GRPO_FAMILY)}", "set algorithm.adv_estimator=grpo")
    _check_support(config, correction, asked)


def _check_support(config: DictConfig, correction: CorrectionSettings, asked: str) -> None:
    """Log-probs of trainer and rollout must be of one distribution over one support."""
    base = "actor_rollout_ref.rollout"
    mode = get(config, f"{base}.logprobs_mode", "processed_logprobs")
    if mode != "processed_logprobs":
        _refuse(asked, config, f"{base}.logprobs_mode", "; the trainer's are at the sampling temperature",
                f"set {base}.logprobs_mode=processed_logprobs")
    if get(config, f"{base}.repetition_penalty", 1.0) != 1.0:
        _refuse(asked, config, f"{base}.repetition_penalty", ": the trainer applies none", f"set {base}.repetition_penalty=1.0")
    if correction.allow_truncated_support:
        return
    fix = "switch it off, or set is_correction.allow_truncated_support=true"
    if get(config, f"{base}.top_p", 1.0) < 1.0:
        _refuse(asked, config, f"{base}.top_p", ": the rollout samples from a smaller support than the trainer's", f"set {base}.top_p=1, or {fix}")
    if get(config, f"{base}.top_k", -1) not in (-1, 0):
        _refuse(asked, config, f"{base}.top_k", ": the rollout samples from a smaller support than the trainer's", f"set {base}.top_k=-1, or {fix}")
    for path in (f"{base}.min_p", f"{base}.engine_kwargs.vllm.override_generation_config.min_p"):
        if get(config, path, 0.0) > 0:
            _refuse(asked, config, path, ": the rollout samples from a smaller support than the trainer's", f"remove it, or {fix}")
