"""The fail-closed matrix: real command lines, composed by Hydra, judged by verl's driver; wrong ones name their key."""

import copy
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.driver import SWITCHES, compose, refusal, start
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.rules.fill import bf16_layers
from verl_fp8.rules.megatron import check_blocks
from verl_fp8.rules.run import validate_run
from verl_fp8.switches.hardware import Hardware, assume
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.trainer import checkpoint

R, A, REF, M = (f"actor_rollout_ref.{node}" for node in ("rollout", "actor", "ref", "model"))
V = f"{R}.engine_kwargs.vllm"
RC = "algorithm.rollout_correction"

# (overrides beside both switches, what the message must name)
BAD_VALUES = [
    ("fp8.mode=foo", "fp8.mode"),
    ("fp8.mode=null", "fp8.mode"),
    ("fp8.mode=true", "fp8.mode"),
    ("fp8.backend=te2", "fp8.backend"),
    ("fp8.backend=1", "fp8.backend"),
    ("fp8.weight_sync=fp16", "fp8.weight_sync"),
    ("fp8.weight_sync=null", "fp8.weight_sync"),
    ("fp8.sync_timeout=-1", "fp8.sync_timeout"),
    ("fp8.sync_timeout=0", "fp8.sync_timeout"),
    ("fp8.sync_timeout=inf", "fp8.sync_timeout"),
    ("fp8.sync_timeout=abc", "fp8.sync_timeout"),
    ("fp8.sync_timeout=true", "fp8.sync_timeout"),
    ("fp8.sync_timeout=null", "fp8.sync_timeout"),
    ("fp8.exact=1", "fp8.exact"),
    ("fp8.exact=maybe", "fp8.exact"),
    ("fp8.lm_head=fp16", "fp8.lm_head"),
    ("fp8.rollout_kernel=triton", "fp8.rollout_kernel"),
    ("fp8.recipe=null", "fp8.recipe"),
    ("fp8.recipe=fast", "fp8.recipe"),
    ("+fp8.bogus=1", "fp8.bogus"),
    ("+fp8.weight_block=[64,64]", "fp8.weight_block"),
    ("+fp8.recipe.bogus=1", "fp8.recipe.bogus"),
    ("+fp8.recipe.activation_block=[1,64]", "fp8.recipe.activation_block"),
    ("+fp8.recipe.fmt=e5m2", "fp8.recipe.fmt"),
    ("fp8.recipe.weight_block=[64]", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=[0,128]", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=[128.0,128]", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=[true,128]", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=128", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=large", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=null", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block={rows:128}", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=[96,96]", "fp8.recipe.weight_block"),
    ("fp8.recipe.scale_format=e8m0", "fp8.recipe.scale_format"),
    ("fp8.recipe.scale_format=null", "fp8.recipe.scale_format"),
    ("fp8.recipe.eps=-1", "fp8.recipe.eps"),
    ("fp8.recipe.eps=true", "fp8.recipe.eps"),
    ("fp8.recipe.eps=nan", "fp8.recipe.eps"),
    ("fp8.recipe.eps=small", "fp8.recipe.eps"),
    ("fp8.recipe.backward=bf16", "fp8.recipe.backward"),
    ("fp8.recipe.exclude=lm_head", "fp8.recipe.exclude"),
    ("fp8.recipe.exclude=[1]", "fp8.recipe.exclude"),
    ("fp8.recipe.exclude=[no.such.layer]", "no.such.layer"),
    ("fp8.recipe.exclude=['*.q_proj']", "fp8.recipe.exclude"),
    ("fp8.recipe.exclude=['*']", "fp8.recipe.exclude"),
    ("is_correction.method=null", "is_correction.method"),
    ("is_correction.method=foo", "is_correction.method"),
    ("is_correction.method=tis", "is_correction.delta"),
    ("+is_correction.bogus=1", "is_correction.bogus"),
    ("is_correction.clip=-1", "is_correction.clip"),
    ("is_correction.clip=true", "is_correction.clip"),
    ("is_correction.clip=abc", "is_correction.clip"),
    ("is_correction.delta=0", "is_correction.delta"),
    ("is_correction.delta=true", "is_correction.delta"),
    ("is_correction.gamma=null", "is_correction.gamma"),
    ("is_correction.beta_var=-1", "is_correction.beta_var"),
    ("is_correction.eps=nan", "is_correction.eps"),
    ("is_correction.level=word", "is_correction.level"),
    ("is_correction.scope=epoch", "is_correction.scope"),
    ("is_correction.mode=off", "is_correction.mode"),
    ("is_correction.ema=1.5", "is_correction.ema"),
    ("is_correction.ema=true", "is_correction.ema"),
    ("is_correction.delta=often", "is_correction.delta"),
    ("is_correction.delta_factor=-1", "is_correction.delta_factor"),
    ("is_correction.delta_steps=0.5", "is_correction.delta_steps"),
    ("is_correction.dump=1", "is_correction.dump"),
    ("is_correction.max_nonfinite_fraction=2", "is_correction.max_nonfinite_fraction"),
    ("is_correction.allow_truncated_support=1", "is_correction.allow_truncated_support"),
    ("is_correction.allow_truncated_support=maybe", "is_correction.allow_truncated_support"),
]

# Something that verl itself would accept, but that undoes a switch or contradicts it.
CONTRADICTIONS = [
    # The wiring taken out, or split into two truths.
    (f"~{R}.fp8", f"{R}.fp8"),
    (f"{R}.fp8=null", f"{R}.fp8"),
    (f"++{R}.fp8.mode=rollout", f"{R}.fp8"),
    (f"~{A}.fsdp_config.fp8", f"{A}.fsdp_config.fp8"),
    (f"~{REF}.fsdp_config.fp8", f"{REF}.fsdp_config.fp8"),
    (f"++{A}.fsdp_config.fp8.recipe.scale_format=pow2", f"{A}.fsdp_config.fp8"),
    (f"~{R}.fp8_model", f"{R}.fp8_model"),
    (f"{R}.fp8_model.path=/elsewhere", f"{R}.fp8_model.path"),
    ("~fp8.mode", "fp8.mode"),
    ("~is_correction.method", "is_correction.method"),
    (f"{A}._target_=verl.workers.config.FSDPActorConfig", f"{A}._target_"),
    (f"{A}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig", f"{A}.fsdp_config._target_"),
    (f"{M}._target_=verl.workers.config.HFModelConfig", f"{M}._target_"),
    (f"{R}._target_=verl.workers.config.RolloutConfig", f"{R}._target_"),
    (f"{REF}._target_=verl.workers.config.FSDPActorConfig", f"{REF}._target_"),
    (f"{REF}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig", f"{REF}.fsdp_config._target_"),
    # Keys nobody reads.
    ("+actor_rollout_ref.fp8=unified", "actor_rollout_ref.fp8"),
    (f"+{A}.fp8.mode=rollout", f"{A}.fp8"),
    (f"+{M}.fp8.recipe.eps=1", f"{M}.fp8"),
    (f"+{R}.weight_sync=bf16", f"{R}.weight_sync"),
    (f"+{M}.external_libs=mine", "external_lib"),
    # The rollout made another one.
    (f"{R}.quantization=null", f"{R}.quantization"),
    (f"{R}.quantization=torchao", f"{R}.quantization"),
    (f"{R}.quantization_config_file=/x.json", f"{R}.quantization_config_file"),
    (f"{R}.dtype=float16", f"{R}.dtype"),
    (f"{R}.name=sglang", f"{R}.name"),
    (f"{R}.name=trtllm", f"{R}.name"),
    (f"{R}.name=hf", f"{R}.name"),
    (f"{R}.mode=sync", f"{R}.mode"),
    (f"{R}.calculate_log_probs=false", f"{R}.calculate_log_probs"),
    (f"{R}.checkpoint_engine.backend=delta_sharded", f"{R}.checkpoint_engine.backend"),
    (f"++{R}.qat.enable=true", f"{R}.qat.enable"),
    (f"{R}.disaggregation.enabled=true", f"{R}.disaggregation.enabled"),
    (f"{R}.engine_kwargs.vllm=null", f"{V}.worker_extension_cls"),
    (f"~{R}.engine_kwargs", f"{V}.worker_extension_cls"),
    (f"{V}.worker_extension_cls=mine.Extension", f"{V}.worker_extension_cls"),
    (f"~{V}.worker_extension_cls", f"{V}.worker_extension_cls"),
    (f"+{V}.worker-extension-cls=mine.Extension", f"{V}.worker-extension-cls"),
    (f"+{V}.hf_overrides.quantization_config.quant_method=fp8", "hf_overrides.quantization_config"),
    (f"+{V}.hf_overrides='{{\"quantization_config\": null}}'", f"{V}.hf_overrides"),
    (f"+{V}.kv_cache_dtype=fp8", f"{V}.kv_cache_dtype"),
    (f"+{V}.kv-cache-dtype=fp8", f"{V}.kv-cache-dtype"),
    (f"+{V}.kv_cache_dt=fp8", f"{V}.kv_cache_dt"),
    (f"+{V}.linear-backend=marlin", f"{V}.linear-backend"),
    (f"+{V}.moe-backend=flashinfer_cutlass", f"{V}.moe-backend"),
    (f"+{V}.moe_back=marlin", f"{V}.moe_back"),
    (f"+{V}.compilation-config.pass_config.fuse_norm_quant=true", f"{V}.compilation-config"),
    (f"+{V}.kernel-config.moe_backend=marlin", f"{V}.kernel-config"),
    (f"+{V}.kernel_config=text", f"{V}.kernel_config"),
    (f"+{V}.quantization=null", f"{V}.quantization"),
    (f"+{V}.dtype=float16", f"{V}.dtype"),
    (f"+{V}.tensor_parallel_size=2", f"{V}.tensor_parallel_size"),
    (f"+{V}.enable_lora=true", f"{V}.enable_lora"),
    (f"+{V}.additional_config=text", f"{V}.additional_config"),
    (f"+{V}.additional_config.verl_fp8.mode=rollout", f"{V}.additional_config.verl_fp8"),
    (f"{R}.tensor_model_parallel_size=4", f"{R}.tensor_model_parallel_size"),
    (f"{R}.tensor_model_parallel_size=0", f"{R}.tensor_model_parallel_size"),
    (f"{R}.tensor_model_parallel_size=two", f"{R}.tensor_model_parallel_size"),
    # The trainer made another one.
    (f"{A}.strategy=fsdp", f"{A}.strategy"),
    (f"{A}.strategy=megatron", f"{A}.strategy"),
    (f"{REF}.strategy=fsdp", f"{REF}.strategy"),
    ("model_engine=megatron", "model_engine"),
    ("model_engine=veomni", "model_engine"),
    ("trainer.use_v1=false", "trainer.use_v1"),
    ("trainer.v1.trainer_mode=separate_async", "trainer.v1.trainer_mode"),
    ("trainer.v1.trainer_mode=bogus", "trainer.v1.trainer_mode"),
    (f"{M}.lora_rank=8", f"{M}.lora_rank"),
    (f"{M}.lora.rank=8", f"{M}.lora.rank"),
    (f"{M}.lora_adapter_path=/adapter", f"{M}.lora_adapter_path"),
    (f"{M}.mtp.enable=true", f"{M}.mtp.enable"),
    (f"{A}.qat.enable=true", f"{A}.qat.enable"),
    (f"{A}.fsdp_config.qat.enable=true", "qat.enable"),
    (f"{REF}.fsdp_config.qat.enable=true", f"{REF}.fsdp_config.qat.enable"),
    (f"+{A}.fsdp_config.mixed_precision.param_dtype=fp16", f"{A}.fsdp_config.mixed_precision.param_dtype"),
    (f"{A}.fsdp_config.dtype=float16", f"{A}.fsdp_config.dtype"),
    (f"{REF}.fsdp_config.dtype=float16", f"{REF}.fsdp_config.dtype"),
    (f"{M}.path=/no/such/model", f"{M}.path"),
    (f"{M}.path=null", f"{M}.path"),
    (f"{M}.hf_config_path=/no/such/model", f"{M}.hf_config_path"),
    # The correction made void, or doubled.
    (f"{RC}.bypass_mode=true", f"{RC}.bypass_mode"),
    (f"{RC}.rollout_is=token", f"{RC}.rollout_is"),
    (f"{RC}.rollout_rs=bogus", f"{RC}.rollout_rs"),
    (f"++{A}.use_rollout_log_probs=true", f"{A}.use_rollout_log_probs"),
    (f"{A}.policy_loss.loss_mode=bypass_mode", f"{A}.policy_loss.loss_mode"),
    ("algorithm.adv_estimator=gae", "algorithm.adv_estimator"),
    ("algorithm.adv_estimator=rloo", "algorithm.adv_estimator"),
    (f"{R}.top_p=0.9", f"{R}.top_p"),
    (f"{R}.top_p=high", f"{R}.top_p"),
    (f"{R}.top_k=50", f"{R}.top_k"),
    (f"+{R}.min_p=0.1", f"{R}.min_p"),
    (f"+{V}.override_generation_config.min_p=0.1", f"{V}.override_generation_config.min_p"),
    (f"++{R}.repetition_penalty=1.1", f"{R}.repetition_penalty"),
    (f"{R}.logprobs_mode=raw_logprobs", f"{R}.logprobs_mode"),
    (f"+{V}.logprobs_mode=raw_logprobs", f"{V}.logprobs_mode"),
    (f"{R}.do_sample=false", f"{R}.do_sample"),
    (f"{R}.temperature=0", f"{R}.temperature"),
    (
        "distillation.enabled=true distillation.distillation_loss.use_task_rewards=false",
        "distillation_loss.use_task_rewards",
    ),
]

# Whole lines, without the switches.
BAD_LINES = [
    ("fp8=unified", "+fp8"),
    ("is_correction=ais", "+is_correction"),
    ("+fp8=foo", "fp8/foo"),
    ("+is_correction=foo", "is_correction/foo"),
    ("+fp8=wiring", "fp8.mode"),
    ("+is_correction=wiring", "is_correction.method"),
    ("+fp8=unified +fp8=rollout", "fp8"),
    ("+fp8@elsewhere=unified", "fp8"),
    ("+fp8.mode=unified", f"{A}._target_"),
    ("+fp8={mode:unified}", f"{A}._target_"),
    ("+is_correction.method=ais", f"{A}._target_"),
    ("+actor_rollout_ref.fp8=unified", "+fp8"),
    ("+actor_rollout_ref.is_correction=ais", "+is_correction"),
    ("+is_corection=ais", "+is_correction"),
    ("+fp_8=unified", "+fp8"),
    ("+actor_rollout_ref.fp8=rollout_per_tensor", "+fp8"),
    ("+fp8=unified fp8.recipe.weights=tensor fp8.recipe.activations=tensor", "fp8.recipe.weights=tensor"),
    ("+fp8=rollout_per_tensor fp8.backend=te", "fp8.backend=te"),
    ("+fp8=rollout_per_tensor trainer.device=cuda", "fp8.recipe.weights=tensor"),
    ("+fp8=bf16 fp8.recipe.weights=channel fp8.recipe.activations=token", "fp8.recipe.weights=channel"),
    (f"+fp8=unified {A}._target_=verl.workers.config.FSDPActorConfig", f"{A}._target_"),
    (f"+is_correction=ais {A}._target_=verl.workers.config.FSDPActorConfig", f"{A}._target_"),
    (f"+is_correction=ais {M}._target_=verl.workers.config.HFModelConfig", f"{M}._target_"),
    ("+is_correction=ais model_engine=veomni", "veomni"),
    (f"+is_correction=ais {R}.name=sglang", f"{R}.name"),
    (f"+is_correction=tis {R}.name=trtllm", f"{R}.name"),
    ("+is_correction=ais trainer.v1.trainer_mode=bogus", "trainer.v1.trainer_mode"),
    ("+fp8=rollout trainer.v1.trainer_mode=separate_async", "trainer.v1.trainer_mode"),
    (f"+is_correction=tis {RC}.rollout_is=null", f"{RC}.rollout_is"),
    (f"+is_correction=tis {RC}=null", f"{RC}.rollout_is"),
    (f"+is_correction=icepop {RC}.rollout_is_threshold=9", f"{RC}.rollout_is_threshold"),
    (f"+is_correction=mis {RC}.bypass_mode=true", f"{RC}.bypass_mode"),
    ("+is_correction=geo_rs is_correction.low=2", "is_correction.low"),
    ("+is_correction=k3_rs is_correction.max_k3=true", "is_correction.max_k3"),
    ("+is_correction=tis is_correction.delta=0.1", "is_correction.delta"),
    (f"+is_correction=none {RC}.rollout_is=token", f"{RC}.rollout_is"),
]

GOOD = [
    "",
    "+fp8=unified",
    "+fp8=rollout",
    "+is_correction=ais",
    f"+is_correction=ais {A}.strategy=fsdp",
    "+is_correction=none",
    "+fp8=unified +is_correction=ais trainer.v1.trainer_mode=colocate_async",
    "+is_correction=ais trainer.v1.trainer_mode=separate_async",
    "+fp8=unified +is_correction=none",
    "+fp8=unified +is_correction=ais",
    "+is_correction=ais +fp8=unified",
    "+fp8=rollout_per_tensor +is_correction=ais",
    "+fp8=rollout fp8.recipe.weights=channel fp8.recipe.activations=token fp8.weight_sync=bf16",
    f"+fp8=rollout_per_tensor {R}.tensor_model_parallel_size=2",
    "+fp8=rollout +is_correction=tis",
    f"+fp8=unified +is_correction=ais {A}.strategy=fsdp2",
    f"+fp8=unified +is_correction=ais {M}.external_lib=mine",
    f"+fp8=unified +is_correction=ais {RC}.rollout_rs=token_k1 {RC}.rollout_rs_threshold=0.5_2.0",
    f"+fp8=unified +is_correction=ais {RC}=null",
    f"+fp8=unified +is_correction=ais {R}.top_p=0.9 is_correction.allow_truncated_support=true",
    f"+fp8=unified +is_correction=ais {R}.tensor_model_parallel_size=2",
    f"+fp8=unified +is_correction=ais +{V}.hf_overrides.rope_theta=1e6 +{V}.max_logprobs=5",
    "+fp8=unified fp8.recipe.weight_block=[64,64] fp8.recipe.scale_format=pow2 fp8.recipe.exclude=['*.1.*']",
    "+fp8=unified fp8.weight_sync=bf16 fp8.sync_timeout=1.5 fp8.backend=reference fp8.recipe.backward=dequantized",
    "+fp8=unified algorithm.adv_estimator=gae critic.enable=false",
]

# An existing FSDP2 job, on verl's own ppo_trainer.
JOB = [
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=8",
    f"{R}.name=vllm",
    f"{R}.n=8",
    f"{R}.log_prob_micro_batch_size_per_gpu=16",
    f"{A}.strategy=fsdp2",
    f"{A}.ppo_micro_batch_size_per_gpu=16",
    f"{REF}.log_prob_micro_batch_size_per_gpu=16",
]


# Beside `model_engine=megatron +fp8=unified_megatron` on H100s: (path, value, what the message must name).
T = f"{A}.megatron.override_transformer_config"
ENV = "ray_kwargs.ray_init.runtime_env.env_vars"
MEGATRON = [
    ("fp8.exact", True, "fp8.exact"),
    ("fp8.backend", "torch", "fp8.backend"),
    ("fp8.backend", "reference", "fp8.backend"),
    ("fp8.lm_head", "fp32", "fp8.lm_head"),
    ("fp8.recipe.weight_block", [64, 64], "fp8.recipe.weight_block"),
    ("fp8.recipe.eps", 0.1, "fp8.recipe.eps"),
    ("fp8.recipe.exclude", ["*.self_attn.*"], "fp8.recipe.exclude"),
    ("fp8.recipe.exclude", ["*.gate_proj", "*.up_proj"], "fp8.recipe.exclude"),
    ("trainer.device", "cpu", "trainer.device=cpu"),
    ("model_engine", "dp", "model_engine=megatron"),
    ("model_engine", "veomni", "model_engine"),
    (f"{A}.strategy", "fsdp2", f"{A}.strategy"),
    (f"{REF}.strategy", "fsdp2", f"{REF}.strategy"),
    (f"{A}.megatron._target_", "verl.workers.config.McoreEngineConfig", f"{A}.megatron._target_"),
    (f"{REF}.megatron._target_", "verl.workers.config.McoreEngineConfig", f"{REF}.megatron._target_"),
    (f"{A}.megatron.fp8", None, f"{A}.megatron.fp8"),
    (f"{REF}.megatron.fp8", {"mode": "unified"}, f"{REF}.megatron.fp8"),
    (f"{A}.megatron.use_mbridge", False, f"{A}.megatron.use_mbridge"),
    (f"{A}.megatron.vanilla_mbridge", True, f"{A}.megatron.vanilla_mbridge"),
    (f"{REF}.megatron.vanilla_mbridge", True, f"{REF}.megatron.vanilla_mbridge"),
    (f"{A}.megatron.use_megatron_fsdp", True, f"{A}.megatron.use_megatron_fsdp"),
    (f"{A}.megatron.dynamic_context_parallel", True, f"{A}.megatron.dynamic_context_parallel"),
    (f"{A}.megatron.dtype", "float16", f"{A}.megatron.dtype"),
    (f"{A}.megatron.qat.enable", True, f"{A}.megatron.qat.enable"),
    (f"{A}.megatron.tensor_model_parallel_size", 4, f"{A}.megatron.tensor_model_parallel_size"),
    (f"{T}.fp8", "hybrid", f"{T}.fp8"),
    (f"{T}.fp8", None, f"{T}.fp8"),
    (f"{T}.fp8_recipe", "delayed", f"{T}.fp8_recipe"),
    (f"{T}.fp8_param", True, f"{T}.fp8_param"),
    (f"{T}.fp8_wgrad", False, f"{T}.fp8_wgrad"),
    (f"{T}.fp4", "e2m1", f"{T}.fp4"),
    (f"{T}.quant_recipe", "mine", f"{T}.quant_recipe"),
    (f"{T}.bf16", False, f"{T}.bf16"),
    (f"{T}.first_last_layers_bf16", True, "fp8.recipe.exclude"),
    (f"{REF}.megatron.override_transformer_config", {}, f"{REF}.megatron.override_transformer_config.fp8"),
    (f"{A}.optim.override_optimizer_config.fp8_recipe", "mxfp8", "override_optimizer_config.fp8_recipe"),
    (f"{ENV}.NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
    (f"{ENV}.NVTE_BACKWARD_OVERRIDE", "dequantized", "NVTE_BACKWARD_OVERRIDE"),
    (f"{M}.lora.rank", 8, f"{M}.lora.rank"),
    (f"{R}.quantization", None, f"{R}.quantization"),
]

# What is wrong with the machine -> what the message must name.
MEGATRON_MACHINES = [
    (Hardware((9, 0), (13, 0), "2.20.2", None), "megatron-core is not installed"),
    (Hardware((9, 0), (13, 0), "2.20.2", "0.15.3"), "megatron-core 0.15.3"),
    (Hardware((9, 0), (13, 0), None, "0.19.2"), "TransformerEngine is not installed"),
    (Hardware((9, 0), (12, 8), "2.20.2", "0.19.2"), "CUDA 12.8"),
    (Hardware((8, 0), (13, 0), "2.20.2", "0.19.2"), "8.0"),
    (Hardware(), "fp8.recipe.scale_format=fp32"),
]


def said(model: str, overrides, **kwargs) -> str | None:
    """The driver's refusal of one command line, Hydra's included."""
    try:
        config = compose(f"{M}.path={model}", *overrides, **kwargs)
    except HydraException as error:
        return f"{error} | {error.__cause__}"
    return refusal(start, config)


def lines(table):
    """pytest parameters of (line, key) pairs; the line is its own id."""
    return [pytest.param(line.split(" "), key, id=line) for line, key in table]


@pytest.mark.parametrize(("overrides", "key"), lines(BAD_VALUES + CONTRADICTIONS))
def test_a_wrong_or_contradicting_override_is_refused_by_name(tiny_model, overrides, key):
    """Both switches are on and one override is wrong: the run does not start, and the sentence names the key."""
    # A later override of a key wins, as on any command line.
    message = said(tiny_model, [*SWITCHES, *overrides])
    assert message is not None and key in message


@pytest.mark.parametrize(("overrides", "key"), lines(BAD_LINES))
def test_a_wrong_line_is_refused_by_name(tiny_model, overrides, key):
    """A switch misspelt, misplaced, half-selected or undone: the run does not start."""
    message = said(tiny_model, overrides)
    assert message is not None and key in message


@pytest.mark.parametrize("line", GOOD, ids=lambda line: line or "no switch")
def test_a_good_line_passes(tiny_model, line):
    """What the documentation offers passes verl's driver."""
    assert said(tiny_model, line.split()) is None


@pytest.mark.parametrize(
    "switches", ["+fp8=unified +is_correction=ais", "+is_correction=ais", "+fp8=unified", "+is_correction=mis"]
)
def test_an_existing_job_needs_only_the_switches(tiny_model, switches):
    """An FSDP2 GRPO job on verl's own ppo_trainer.yaml passes with the switches appended."""
    assert (
        said(tiny_model, [*JOB, *switches.split(), f"{R}.tensor_model_parallel_size=1"], config_name="ppo_trainer")
        is None
    )


def test_a_correction_runs_on_megatron_too(tiny_model):
    """AIS lives on the driver, so it takes verl's Megatron actor; the FSDP2 modes name the one for Megatron."""
    job = [o for o in JOB if not o.startswith(f"{A}.strategy")]
    assert said(tiny_model, [*job, "model_engine=megatron", "+is_correction=ais"], config_name="ppo_trainer") is None
    for name, engine in (("ppo_trainer", ["model_engine=megatron"]), ("ppo_megatron_trainer", [])):
        message = said(tiny_model, [*job, *engine, "+fp8=unified"], config_name=name)
        assert "model_engine=megatron" in message and "+fp8=unified_megatron" in message
    message = said(tiny_model, [*JOB, "+fp8=unified_megatron"], config_name="ppo_trainer")
    assert "model_engine=dp" in message and "set model_engine=megatron" in message


@pytest.fixture(scope="module")
def megatron_job(tiny_model):
    """A Megatron job with both switches, composed once; tests change copies."""
    job = [o for o in JOB if not o.startswith(f"{A}.strategy")]
    line = [
        *job,
        "model_engine=megatron",
        "+fp8=unified_megatron",
        "+is_correction=ais",
        f"{R}.tensor_model_parallel_size=1",
    ]
    return compose(f"{M}.path={tiny_model}", *line, config_name="ppo_trainer")


def changed(job, path=None, value=None):
    """A copy of the configuration with one value changed, as an override on the command line would."""
    job = copy.deepcopy(job)
    if path is not None:
        OmegaConf.update(job, path, value, merge=False, force_add=True)
    return job


def test_a_megatron_job_needs_only_the_switches(megatron_job):
    """verl's driver accepts it; recipe and backward reach every worker's environment, whole bf16 layers Megatron's keys."""
    with assume(Hardware((9, 0), (13, 0), "2.20.2", "0.19.2")):
        assert refusal(start, job := changed(megatron_job)) is None
        assert job.ray_kwargs.ray_init.runtime_env.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES == "1"
        assert "first_last_layers_bf16" not in OmegaConf.select(job, T)
        assert refusal(validate_run, job) is None  # what the first pass wrote, the second accepts
        assert refusal(validate_run, job := changed(megatron_job, "fp8.recipe.exclude", ["model.layers.1.*"])) is None
        for node in (OmegaConf.select(job, T), job.actor_rollout_ref.ref.megatron.override_transformer_config):
            assert node.first_last_layers_bf16
            assert (node.num_layers_at_start_in_bf16, node.num_layers_at_end_in_bf16) == (0, 1)
        job = changed(
            changed(megatron_job, "fp8.recipe.exclude", ["model.layers.0.*"]),
            f"{A}.megatron.pipeline_model_parallel_size",
            4,
        )
        assert "pipeline_model_parallel_size" in refusal(validate_run, job)
        assert refusal(validate_run, job := changed(megatron_job, "fp8.recipe.backward", "high_precision")) is None
        assert job.ray_kwargs.ray_init.runtime_env.env_vars.NVTE_BACKWARD_OVERRIDE == "high_precision"
    with assume(Hardware((10, 0), (13, 0), "2.20.2", "0.19.2")):
        assert refusal(validate_run, job := changed(megatron_job)) is None
        assert job.ray_kwargs.ray_init.runtime_env.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES == "0"
    # A driver without a GPU, told the format.
    assert refusal(validate_run, job := changed(megatron_job, "fp8.recipe.scale_format", "fp32")) is None
    assert job.ray_kwargs.ray_init.runtime_env.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES == "1"


@pytest.mark.parametrize(("path", "value", "named"), MEGATRON, ids=lambda v: str(v))
def test_a_wrong_megatron_job_is_refused_by_name(megatron_job, path, value, named):
    """One value of the Megatron job is wrong: the run does not start, and the sentence names the key."""
    with assume(Hardware((9, 0), (13, 0), "2.20.2", "0.19.2")):
        message = refusal(validate_run, changed(megatron_job, path, value))
    assert message is not None and named in message


@pytest.mark.parametrize(("machine", "named"), MEGATRON_MACHINES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_megatron_job_is_refused_on_a_machine_that_cannot(megatron_job, machine, named):
    """A GPU, CUDA, TransformerEngine or Megatron that will not do, or a driver that cannot tell the scale format."""
    with assume(machine):
        message = refusal(validate_run, changed(megatron_job))
    assert message is not None and named in message and "+fp8=unified_megatron" in message


@pytest.mark.parametrize(
    ("shape", "node", "named"),
    [
        ({}, {}, None),
        ({}, {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, None),
        ({}, {"tensor_model_parallel_size": 4}, "expert_tensor_parallel_size=4; found: model.layers.0.mlp.experts.0.gate"),
        ({}, {"tensor_model_parallel_size": 8}, "4 key and value heads"),
        ({"head_dim": 64}, {}, "heads of 64"),
        ({"moe_intermediate_size": 704}, {}, "704"),
        ({"hidden_size": 2056}, {}, "multiples of 16"),
        ({"model_type": "deepseek_v3"}, {}, "a deepseek_v3 model"),
    ],
)  # fmt: skip
def test_blocks_must_fall_on_megatrons_shards(shape, node, named):
    """By Qwen3-30B-A3B's sizes: experts of 768 divide by tensor parallelism into whole blocks or not at all."""
    config = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
              "head_dim": 128, "moe_intermediate_size": 768, **shape}  # fmt: skip
    hidden, heads, expert = config["hidden_size"], 32 * config["head_dim"], config["moe_intermediate_size"]
    layer = "model.layers.0"
    shapes = {f"{layer}.self_attn.q_proj": (heads, hidden), f"{layer}.self_attn.k_proj": (heads // 8, hidden),
              f"{layer}.self_attn.v_proj": (heads // 8, hidden), f"{layer}.self_attn.o_proj": (hidden, heads),
              f"{layer}.mlp.experts.0.gate_proj": (expert, hidden), f"{layer}.mlp.experts.0.up_proj": (expert, hidden),
              f"{layer}.mlp.experts.0.down_proj": (hidden, expert)}  # fmt: skip
    message = refusal(check_blocks, SimpleNamespace(**config), shapes, tuple(shapes), node)
    assert message is None if named is None else named in message


def test_only_whole_layers_at_the_ends_stay_in_bf16():
    """The keys Megatron has for ``fp8.recipe.exclude``, and a refusal of what it has none for."""
    names = [f"model.layers.{i}.mlp.{leaf}" for i in range(4) for leaf in ("up_proj", "down_proj")]

    def keys(*patterns):
        return bf16_layers(4, *LayerFilter(exclude=patterns).split({n: (128, 128) for n in [*names, "lm_head"]}))

    assert keys() == keys("lm_head") == {}
    assert list(keys("*.0.*", "*.1.*", "*.3.*").values()) == [True, 2, 1]
    for patterns, named in (
        (["*.1.*"], "layer 1 of 4"),
        (["*.2.*"], "layer 2 of 4"),
        (["*.0.mlp.down_proj"], "down_proj"),
    ):
        assert named in refusal(keys, *patterns)


@pytest.mark.parametrize("switches", [["+fp8=unified"], ["+is_correction=ais"], SWITCHES], ids=" ".join)
@pytest.mark.parametrize(
    "entry",
    ["fully_async_policy.fully_async_main.FullyAsyncTaskRunner", "one_step_off_policy.main_ppo.OneStepTaskRunner"],
)
def test_another_entry_point_is_refused(tiny_model, switches, entry):
    """verl's other asynchronous trainers share run_ppo, check nothing on the driver and never meet the stage."""
    from verl.trainer.main_ppo import run_ppo

    module, _, name = entry.rpartition(".")
    runner = getattr(importlib.import_module(f"verl.experimental.{module}"), name)
    message = refusal(run_ppo, compose(f"{M}.path={tiny_model}", *switches), task_runner_class=runner)
    assert message is not None and name in message and "trainer.v1.trainer_mode=colocate_async" in message


def test_a_checkpoint_is_judged_on_the_driver(tiny_model, tmp_path):
    """Another recipe, another GPU generation and a cut file stop before Ray starts; the same recipe passes."""
    folder = tmp_path / "global_step_3" / "actor"
    folder.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    line = [*SWITCHES, "trainer.resume_mode=auto", f"trainer.default_local_dir={tmp_path}"]
    saved = Fp8Settings.parse({"mode": "unified"}, capability=None)
    checkpoint.write(folder, {"mode": "unified", "recipe": saved.recipe.to_dict(), "layers": []})
    assert said(tiny_model, line) is None
    assert "scale_format='fp32', now 'pow2'" in said(tiny_model, [*line, "fp8.recipe.scale_format=pow2"])
    blackwell = Hardware(capability=(10, 0), cuda=(13, 0), transformer_engine="2.20.2")
    with assume(blackwell):
        assert "set fp8.recipe.scale_format=fp32" in said(tiny_model, line)
    cut = folder / "optim_world_size_1_rank_0.pt"
    cut.write_bytes(b"PK\x03\x04cut")
    assert str(cut) in said(tiny_model, line)
    assert said(tiny_model, [*line, "trainer.resume_mode=disable"]) is None


def test_megatrons_own_fp8_keys_are_left_alone(tiny_model):
    """``override_transformer_config.fp8`` is Megatron's, whatever it is called: no switch of ours, no refusal."""
    job = [o for o in JOB if not o.startswith(f"{A}.strategy")]
    own = [f"+{A}.megatron.override_transformer_config.{k}" for k in ("fp8=e4m3", "fp8_recipe=blockwise")]
    assert said(tiny_model, [*job, "model_engine=megatron", *own], config_name="ppo_trainer") is None


def recipe(tmp_path, defaults: str):
    """A recipe file with these defaults and the job as its body."""
    body = f"""
defaults: [{defaults}]
algorithm: {{adv_estimator: grpo}}
actor_rollout_ref:
  actor: {{strategy: fsdp2, ppo_micro_batch_size_per_gpu: 16}}
  ref: {{log_prob_micro_batch_size_per_gpu: 16}}
  rollout: {{name: vllm, n: 8, log_prob_micro_batch_size_per_gpu: 16, tensor_model_parallel_size: 1}}
"""
    (tmp_path / "mine.yaml").write_text(body)
    return {"config_dir": tmp_path, "config_name": "mine"}


def test_a_recipe_names_the_groups_in_its_defaults(tiny_model, tmp_path):
    """The documented recipe form passes, and turns a key of the groups in its own body into the run's."""
    where = recipe(tmp_path, "ppo_trainer, fp8: unified, is_correction: ais, _self_")
    assert said(tiny_model, [], **where) is None
    assert "fp8.recipe.eps" in said(tiny_model, ["fp8.recipe.eps=-1"], **where)


@pytest.mark.parametrize("group", ["fp8: unified", "is_correction: ais", "fp8: unified, is_correction: ais"])
def test_a_recipe_with_the_groups_before_ppo_trainer_is_refused(tiny_model, tmp_path, group):
    """ppo_trainer then puts verl's own classes back, and the run would train without what the recipe says."""
    message = said(tiny_model, [], **recipe(tmp_path, f"{group}, ppo_trainer, _self_"))
    assert message is not None and "after ppo_trainer" in message


@pytest.mark.slow
def test_a_recipe_without_the_package_is_refused_by_hydra(tmp_path):
    """Named in a defaults list a group that is not on the search path is an error, not a string."""
    recipe(tmp_path, "ppo_trainer, fp8: unified, _self_")
    run = cli(
        ["--config-dir", str(tmp_path), "--config-name", "mine"], VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM=""
    )
    assert run.returncode == 2 and "fp8/unified" in run.stderr


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (transformers.GptOssConfig(num_hidden_layers=1, num_local_experts=4), "mlp.experts"),
        (transformers.Qwen2_5_VLConfig(), "Qwen2_5_VLConfig"),
        (transformers.GPT2Config(n_layer=1), "GPT2Config"),
    ],
    ids=["experts of another layout", "vision", "no nn.Linear"],
)
def test_a_model_that_would_not_be_fp8_is_refused(tmp_path, config, key):
    """Layers that vLLM would quantise and the trainer not, or none at all."""
    config.save_pretrained(tmp_path)
    assert key in said(str(tmp_path), SWITCHES)
    assert said(str(tmp_path), ["+is_correction=ais"]) is None


def test_an_already_quantised_model_is_refused(tiny_model, tmp_path):
    """Its weights are codes already; training them needs the unquantised checkpoint."""
    values = json.loads(Path(tiny_model, "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "quantization_config" in said(str(tmp_path), SWITCHES)


def test_experts_are_quantised_in_blocks_only(make_model):
    """One scale a tensor reaches no expert: refused, with the key that keeps them in bf16 and does pass."""
    model = make_model("qwen3_moe")
    message = said(model, ["+fp8=rollout_per_tensor"])
    assert "fp8.recipe.weights=tensor" in message and "fp8.recipe.exclude=['*.mlp.experts.*']" in message
    assert said(model, ["+fp8=rollout_per_tensor", "fp8.recipe.exclude=['*.mlp.experts.*']"]) is None


def cli(arguments, **environment):
    """``python -m verl_fp8 check`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "verl_fp8", "check", *arguments],
        capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip


def quickstart(root, model):
    """The command line of the quickstart up to its switches."""
    return ["--config-dir", str(root / "recipes"), "--config-name", "quickstart", f"{M}.path={model}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "environment", "code", "text"),
    [
        (SWITCHES, {}, 0, "14 of 15 linear layers in FP8"),
        ([*SWITCHES, f"{R}.quantization=null"], {}, 2, f"{R}.quantization"),
        (["+fp8=unified"], {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_PLATFORM": ""}, 2, "the plain string 'unified'"),
    ],
    ids=["good", "contradiction", "the group silently absent"],
)
def test_the_check_command_says_the_same(root, tiny_model, overrides, environment, code, text):
    """``verl-fp8 check`` in its own process: exit code and sentence."""
    run = cli([*quickstart(root, tiny_model), *overrides], **environment)
    assert (run.returncode, text in run.stdout + run.stderr) == (code, True), run.stdout + run.stderr
    # What AIS will do besides its constants, where the line is good.
    assert code or "weights 128x128, activations 1x128" in run.stdout and "scope=batch, mode=apply" in run.stdout


@pytest.mark.slow
def test_main_ppo_itself_stops_before_ray(root, tiny_model):
    """``python -m verl.trainer.main_ppo`` with a contradiction ends with our sentence and has not started Ray."""
    line = [*quickstart(root, tiny_model), *SWITCHES, f"{R}.quantization=null"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *line, "hydra.run.dir=.", "hydra.output_subdir=null"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tiny_model)
    assert run.returncode != 0
    assert f"found: {R}.quantization=None" in run.stderr
    assert "ray init kwargs" not in run.stdout
