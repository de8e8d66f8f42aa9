"""The groups act or the run does not start: taken out, split in two, misspelt, misplaced or half-selected."""

import pytest

from tests.driver import SWITCHES
from tests.rules.lines import JOB, REF, A, M, R, V, lines, said

# Beside both switches: what the groups wrote is taken out, or is there twice with two values.
UNDONE = [
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
]

# Beside both switches: keys that nobody reads.
UNREAD = [
    ("+actor_rollout_ref.fp8=unified", "actor_rollout_ref.fp8"),
    (f"+{A}.fp8.mode=rollout", f"{A}.fp8"),
    (f"+{M}.fp8.recipe.eps=1", f"{M}.fp8"),
    (f"+{R}.weight_sync=bf16", f"{R}.weight_sync"),
    (f"+{M}.external_libs=mine", "external_lib"),
]

# Beside both switches: vLLM's arguments by another name, in another form, or beside verl's own key.
OTHER_NAMES = [
    (f"+{V}.worker-extension-cls=mine.Extension", f"{V}.worker-extension-cls"),
    (f"+{V}.hf_overrides='{{\"quantization_config\": null}}'", f"{V}.hf_overrides"),
    (f"+{V}.kv-cache-dtype=fp8", f"{V}.kv-cache-dtype"),
    (f"+{V}.kv_cache_dt=fp8", f"{V}.kv_cache_dt"),
    (f"+{V}.linear-backend=marlin", f"{V}.linear-backend"),
    (f"+{V}.moe-backend=flashinfer_cutlass", f"{V}.moe-backend"),
    (f"+{V}.moe_back=marlin", f"{V}.moe_back"),
    (f"+{V}.compilation-config.pass_config.fuse_norm_quant=true", f"{V}.compilation-config"),
    (f"+{V}.kernel-config.moe_backend=marlin", f"{V}.kernel-config"),
    (f"+{V}.kernel_config=text", f"{V}.kernel_config"),
    (f"+{V}.dtype=float16", f"{V}.dtype"),
    (f"+{V}.tensor_parallel_size=2", f"{V}.tensor_parallel_size"),
    (f"+{V}.enable_lora=true", f"{V}.enable_lora"),
    (f"+{V}.additional_config=text", f"{V}.additional_config"),
    (f"+{V}.additional_config.verl_fp8.mode=rollout", f"{V}.additional_config.verl_fp8"),
]

# Whole lines, without the switches.
LINES = [
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
    (f"+fp8=unified {A}._target_=verl.workers.config.FSDPActorConfig", f"{A}._target_"),
    (f"+is_correction=ais {A}._target_=verl.workers.config.FSDPActorConfig", f"{A}._target_"),
    (f"+is_correction=ais {M}._target_=verl.workers.config.HFModelConfig", f"{M}._target_"),
]


@pytest.mark.parametrize(("overrides", "key"), lines(UNDONE + UNREAD))
def test_a_switch_that_is_undone_is_refused_by_name(tiny_model, overrides, key):
    """Both switches are on and one override takes a part away: the sentence names the key."""
    # A later override of a key wins, as on any command line.
    message = said(tiny_model, [*SWITCHES, *overrides])
    assert message is not None and key in message


@pytest.mark.parametrize(("overrides", "key"), lines(OTHER_NAMES))
def test_an_argument_of_vllm_in_disguise_is_refused_by_name(tiny_model, overrides, key):
    """vLLM would read it as an argument that the rules judge."""
    # A later override of a key wins, as on any command line.
    message = said(tiny_model, [*SWITCHES, *overrides])
    assert message is not None and key in message


@pytest.mark.parametrize(("overrides", "key"), lines(LINES))
def test_a_misspelt_or_misplaced_switch_is_refused_by_name(tiny_model, overrides, key):
    """A switch misspelt, misplaced, half-selected or undone: the run does not start."""
    message = said(tiny_model, overrides)
    assert message is not None and key in message


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
