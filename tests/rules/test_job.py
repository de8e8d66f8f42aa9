"""What ``fp8`` needs of verl's trainer and rollout: one wrong key, and the run does not start."""

import pytest

from tests.driver import SWITCHES
from tests.rules.lines import REF, A, M, R, V, lines, said

# Beside both switches: the rollout made another one.
ROLLOUT = [
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
    (f"+{V}.hf_overrides.quantization_config.quant_method=fp8", "hf_overrides.quantization_config"),
    (f"+{V}.kv_cache_dtype=fp8", f"{V}.kv_cache_dtype"),
    (f"+{V}.quantization=null", f"{V}.quantization"),
    (f"{R}.tensor_model_parallel_size=4", f"{R}.tensor_model_parallel_size"),
    (f"{R}.tensor_model_parallel_size=0", f"{R}.tensor_model_parallel_size"),
    (f"{R}.tensor_model_parallel_size=two", f"{R}.tensor_model_parallel_size"),
]

# Beside both switches: the trainer made another one.
TRAINER = [
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
]

# Whole lines, without the switches.
LINES = [
    ("+fp8=unified fp8.recipe.weights=tensor fp8.recipe.activations=tensor", "fp8.recipe.weights=tensor"),
    ("+fp8=rollout_per_tensor fp8.backend=te", "fp8.backend=te"),
    ("+fp8=rollout_per_tensor trainer.device=cuda", "fp8.recipe.weights=tensor"),
    ("+fp8=bf16 fp8.recipe.weights=channel fp8.recipe.activations=token", "fp8.recipe.weights=channel"),
    ("+is_correction=ais model_engine=veomni", "veomni"),
    (f"+is_correction=ais {R}.name=sglang", f"{R}.name"),
    (f"+is_correction=tis {R}.name=trtllm", f"{R}.name"),
    ("+is_correction=ais trainer.v1.trainer_mode=bogus", "trainer.v1.trainer_mode"),
    ("+fp8=rollout trainer.v1.trainer_mode=separate_async", "trainer.v1.trainer_mode"),
]


@pytest.mark.parametrize(("overrides", "key"), lines(ROLLOUT))
def test_another_rollout_is_refused_by_name(tiny_model, overrides, key):
    """vLLM would not serve the recipe, or not through our extension."""
    # A later override of a key wins, as on any command line.
    message = said(tiny_model, [*SWITCHES, *overrides])
    assert message is not None and key in message


@pytest.mark.parametrize(("overrides", "key"), lines(TRAINER))
def test_another_trainer_is_refused_by_name(tiny_model, overrides, key):
    """The trainer would not be the FP8 engine, or not of a plain bf16 model."""
    # A later override of a key wins, as on any command line.
    message = said(tiny_model, [*SWITCHES, *overrides])
    assert message is not None and key in message


@pytest.mark.parametrize(("overrides", "key"), lines(LINES))
def test_a_mode_on_the_wrong_job_is_refused_by_name(tiny_model, overrides, key):
    """A mode of FP8 or a correction on an engine, a rollout or scales that it is not for."""
    message = said(tiny_model, overrides)
    assert message is not None and key in message
