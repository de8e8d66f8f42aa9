"""What both switches need of the job, and what ``fp8`` needs of its trainer (FSDP2) and its rollout: mostly tables."""

from collections.abc import Iterator

from verl_fp8.rollout.arguments import EXTENSION
from verl_fp8.rules.asked import Run
from verl_fp8.rules.groups import targets_of
from verl_fp8.rules.refuse import Key, Refusal, get, off, table, zero

# What the switches have been tried with: verl's trainer modes and rollout engines.
FP8_MODES = ("sync", "colocate_async")
MODES = (*FP8_MODES, "separate_async")
ROLLOUT = "vllm"

_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{node}" for node in ("actor", "model", "rollout"))
_QAT = ", another quantiser"


def trainer_and_rollout_are_known(run: Run) -> Iterator[Refusal]:
    """verl's V1 trainer in a mode that was tried, and vLLM: what either switch acts on."""
    modes = FP8_MODES if get(run.config, "fp8") is not None else MODES
    keys = (
        Key("trainer.use_v1", bool, ", verl's deprecated trainer", "set {path}=true", default=True),
        Key(
            "trainer.v1.trainer_mode",
            modes,
            f"; tried with {', '.join(modes)}",
            f"set {{path}}={modes[0]}",
            default="sync",
        ),
        Key(
            f"{_ROLLOUT}.name",
            (ROLLOUT,),
            ", whose quantiser and log-probs the switches do not reach",
            f"set {{path}}={ROLLOUT}",
        ),
        Key(f"{_ROLLOUT}.mode", ("async",), ", which verl 0.9 no longer has", "set {path}=async", default="async"),
    )
    yield from table(run.config, run.asked, keys)


def our_classes_are_in_place(run: Run) -> Iterator[Refusal]:
    """The classes of ours that a correction, and so either switch, puts into verl's configuration are still there."""
    fix = "select the groups after ppo_trainer, and remove any override of {path}"
    for path, target in targets_of("is_correction/wiring").items():
        key = Key(path, (target,), f" instead of {target}, so the switches would not act", fix)
        yield from table(run.config, run.asked, [key])


def the_engine_is_the_modes(run: Run) -> Iterator[Refusal]:
    """``model_engine``, the strategies and our engine's classes are those of ``fp8.mode``."""
    config, megatron = run.config, run.fp8.megatron
    engine = get(config, "model_engine", "dp")
    wanted, other = ("megatron", "unified") if megatron else ("fsdp2", "unified_megatron")
    if (engine == "megatron") != megatron or engine not in ("dp", "megatron"):
        fix = f"use +fp8={other}, or " if engine in ("dp", "megatron") else ""
        fix += "set model_engine=megatron" if megatron else f"remove model_engine={engine}: this mode is for FSDP2"
        yield Refusal(run.asked, f"model_engine={engine}", fix)
    actors = get(config, f"{_ACTOR}.strategy")
    keys = [Key(f"{_ACTOR}.strategy", (wanted,), "", f"set {{path}}={wanted}")]
    engine_file = "fp8/unified_megatron" if megatron else "fp8/wiring_fsdp2"
    for path, target in {**targets_of("fp8/wiring"), **targets_of(engine_file)}.items():
        keys.append(Key(path, (target,), f" instead of {target}", "remove the override of {path}"))
    fix = f"set {{path}}={wanted}, or remove it"
    keys.append(Key("actor_rollout_ref.ref.strategy", (wanted,), "", fix, default=actors))
    yield from table(config, run.asked, keys)


# What the FP8 engines were not tried with, or what changes the weights or the codes behind their backs.
_UNTRIED = (
    Key(f"{_MODEL}.lora_rank", zero, ": LoRA adapters", "set {path}=0 or remove +fp8", default=0, numeric=True),
    Key(f"{_MODEL}.lora.rank", zero, ": LoRA adapters", "set {path}=0 or remove +fp8", default=0, numeric=True),
    Key(f"{_MODEL}.lora_adapter_path", off, "", "remove lora_adapter_path or +fp8"),
    Key(f"{_ACTOR}.qat.enable", off, _QAT, "set it to false"),
    Key(f"{_MODEL}.mtp.enable", off, ": not tried with FP8 weights", "set it to false or remove +fp8"),
)


def the_model_has_plain_weights(run: Run) -> Iterator[Refusal]:
    """No adapters, no second quantiser, no prediction of several tokens."""
    yield from table(run.config, run.asked, _UNTRIED)


def fsdp_trains_bf16(run: Run) -> Iterator[Refusal]:
    """FSDP2: parameters are gathered in bf16, which the recipe quantises; no second quantiser."""
    if run.fp8.megatron:
        return
    for role in ("actor", "ref"):
        base = f"actor_rollout_ref.{role}.fsdp_config"
        keys = (
            Key(f"{base}.qat.enable", off, _QAT, "set {path}=false"),
            Key(
                f"{base}.mixed_precision.param_dtype",
                ("bf16", "bfloat16"),
                "; the recipe quantises bf16",
                "set it to bf16",
                default="bf16",
            ),
            Key(
                f"{base}.dtype",
                ("bfloat16",),
                "; the recipe quantises bf16",
                "set {path}=bfloat16",
                default="bfloat16",
            ),
        )
        yield from table(run.config, run.asked, keys)


# Beside `quantization`, which depends on the mode.
_SERVED = (
    Key(
        f"{_ROLLOUT}.dtype",
        ("bfloat16",),
        ": activations reach the quantiser in bf16",
        "set {path}=bfloat16, or remove the override",
    ),
    Key(
        f"{_ROLLOUT}.calculate_log_probs",
        (True,),
        ": the mismatch could not be seen",
        "set {path}=true, or remove the override",
    ),
    Key(f"{_ROLLOUT}.quantization_config_file", off, "", "remove it; fp8.recipe.* describes the quantisation"),
    Key(f"{_ROLLOUT}.qat.enable", off, _QAT, "set {path}=false"),
    Key(f"{_ROLLOUT}.disaggregation.enabled", off, ": not tried with FP8 weights", "set {path}=false"),
    Key(
        f"{_ROLLOUT}.checkpoint_engine.backend",
        lambda backend: backend != "delta_sharded",
        ", which ships bf16 deltas",
        "set it to naive or nccl",
        default="naive",
    ),
    Key(
        f"{_ROLLOUT}.engine_kwargs.vllm.worker_extension_cls",
        (EXTENSION,),
        "",
        f"remove the override ({EXTENSION} is needed)",
    ),
)


def the_rollout_serves_the_recipe(run: Run) -> Iterator[Refusal]:
    """vLLM loads the layers in the recipe's FP8, or in bf16 with ``fp8.mode=bf16``, through our worker extension."""
    value, shown, why = "fp8", "fp8", "the rollout would not be the recipe's FP8"
    if run.fp8.layer_filter is None:
        value, shown, why = None, "null", "fp8.mode=bf16 has no FP8 layer"
    fix = f"set {{path}}={shown}, or remove the override"
    yield from table(run.config, run.asked, [Key(f"{_ROLLOUT}.quantization", (value,), f": {why}", fix), *_SERVED])


SHARED = (trainer_and_rollout_are_known, our_classes_are_in_place)
ENGINE = (the_engine_is_the_modes, the_model_has_plain_weights, fsdp_trains_bf16)
