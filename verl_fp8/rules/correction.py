"""The rules for ``+is_correction=...``, part of verl_fp8.rules.run: what must hold of the job for a correction to be one."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_fp8.correction.dump import check_folder, run_of
from verl_fp8.correction.reweight import ais_config
from verl_fp8.correction.verls_methods import rollout_correction, same_setting, try_rollout_correction
from verl_fp8.errors import ConfigError
from verl_fp8.rules import resume
from verl_fp8.rules.refuse import get, number, refuse
from verl_fp8.switches.settings import CorrectionSettings

# Estimators that turn group rewards into one advantage a response, as the paper's experiments do.
GRPO_FAMILY = ("grpo", "grpo_vectorized")


def check_correction(config: DictConfig, correction: CorrectionSettings) -> None:
    """Refuse what contradicts the method, or would leave it without effect.

    Raises:
        ConfigError: names the key.
    """
    asked = f"+is_correction={correction.method}"
    verls = correction.method not in ("ais", "none")
    if verls:
        _check_rollout_correction(config, correction, asked)
    elif get(config, "algorithm.rollout_correction.rollout_is") is not None:
        refuse(
            asked,
            config,
            "algorithm.rollout_correction.rollout_is",
            ", a second correction of the same ratio",
            "set algorithm.rollout_correction.rollout_is=null, or remove is_correction",
        )
    if correction.method == "none" and correction.dump is None:
        return
    if get(config, "algorithm.rollout_correction.bypass_mode", False):
        refuse(
            asked,
            config,
            "algorithm.rollout_correction.bypass_mode",
            ": the trainer's log-probs are the rollout's, every ratio would be 1",
            "set it to false",
        )
    if get(config, "actor_rollout_ref.actor.policy_loss.loss_mode") == "bypass_mode":
        refuse(
            asked,
            config,
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            ", which corrects by itself",
            "set it to vanilla",
        )
    if get(config, "actor_rollout_ref.actor.use_rollout_log_probs", False):
        refuse(
            asked,
            config,
            "actor_rollout_ref.actor.use_rollout_log_probs",
            ": every ratio would be 1",
            "set it to false",
        )
    if not get(config, "actor_rollout_ref.rollout.calculate_log_probs", False):
        refuse(
            asked,
            config,
            "actor_rollout_ref.rollout.calculate_log_probs",
            "",
            "set actor_rollout_ref.rollout.calculate_log_probs=true",
        )
    if correction.method != "none":
        _check_support(config, correction, asked)
    if correction.method == "ais":
        _check_ais(config, correction, asked)
    if correction.dump is not None:
        _check_dump(config, correction)


def _check_rollout_correction(config: DictConfig, correction: CorrectionSettings, asked: str) -> None:
    """verl's own settings must be what the method means, whoever set them."""
    for key, meant in rollout_correction(correction).items():
        path = f"algorithm.rollout_correction.{key}"
        found = get(config, path)
        if not same_setting(found, meant):
            refuse(
                asked,
                config,
                path,
                f", where {correction.method} means {meant}",
                f"remove the override of {path}; is_correction.* sets the method's values",
            )


def _check_ais(config: DictConfig, correction: CorrectionSettings, asked: str) -> None:
    ais_config(correction)
    estimator = get(config, "algorithm.adv_estimator")
    if str(estimator) not in GRPO_FAMILY:
        refuse(
            asked,
            config,
            "algorithm.adv_estimator",
            f"; AIS is tested with {', '.join(GRPO_FAMILY)}",
            "set algorithm.adv_estimator=grpo",
        )
    if get(config, "distillation.enabled", False) and not get(
        config, "distillation.distillation_loss.use_task_rewards", True
    ):
        path = "distillation.distillation_loss.use_task_rewards"
        refuse(asked, config, path, ": the loss reads no advantages", f"set {path}=true, or remove is_correction")
    node = OmegaConf.to_container(config.algorithm.get("rollout_correction") or OmegaConf.create(), resolve=True)
    if node.get("rollout_rs") is not None:
        try:
            try_rollout_correction(node)
        except (TypeError, ValueError) as error:
            found = (
                f"rollout_rs={node['rollout_rs']}, rollout_rs_threshold={node.get('rollout_rs_threshold')} ({error})"
            )
            fix = "correct algorithm.rollout_correction.rollout_rs or rollout_rs_threshold"
            raise ConfigError(f"{asked} with rejection sampling", found, fix) from error
    if correction.scope == "mini_batch":
        asked, actor = "is_correction.scope=mini_batch", "actor_rollout_ref.actor"
        fix = "set is_correction.scope=batch"
        if get(config, f"{actor}.shuffle", False) and number(config, f"{actor}.ppo_epochs", 1) > 1:
            refuse(
                asked,
                config,
                f"{actor}.shuffle",
                ": each of several ppo_epochs forms other mini-batches of the same rows",
                f"set {actor}.shuffle=false or ppo_epochs=1, or {fix}",
            )
        if number(config, "trainer.critic_warmup", 0) > 0:
            refuse(
                asked,
                config,
                "trainer.critic_warmup",
                ": batches that the actor never cuts",
                f"set trainer.critic_warmup=0, or {fix}",
            )


def _check_dump(config: DictConfig, correction: CorrectionSettings) -> None:
    check_folder(Path(correction.dump.folder), run_of(config), resumed=resume.resumed(config.trainer) is not None)


def _check_support(config: DictConfig, correction: CorrectionSettings, asked: str) -> None:
    """Log-probs of trainer and rollout must be of one distribution over one support."""
    base = "actor_rollout_ref.rollout"
    mode = get(config, f"{base}.logprobs_mode", "processed_logprobs")
    if mode != "processed_logprobs":
        refuse(
            asked,
            config,
            f"{base}.logprobs_mode",
            "; the trainer's are at the sampling temperature",
            f"set {base}.logprobs_mode=processed_logprobs",
        )
    if not get(config, f"{base}.do_sample", True) or number(config, f"{base}.temperature", 1.0) <= 0:
        greedy = f"{base}.do_sample" if not get(config, f"{base}.do_sample", True) else f"{base}.temperature"
        refuse(
            asked,
            config,
            greedy,
            ": greedy answers are no samples of the policy",
            f"set {base}.do_sample=true and temperature=1",
        )
    if get(config, f"{base}.repetition_penalty", 1.0) != 1.0:
        refuse(
            asked,
            config,
            f"{base}.repetition_penalty",
            ": the trainer applies none",
            f"set {base}.repetition_penalty=1.0",
        )
    if correction.allow_truncated_support:
        return
    fix = "switch it off, or set is_correction.allow_truncated_support=true"
    if number(config, f"{base}.top_p", 1.0) < 1.0:
        refuse(
            asked,
            config,
            f"{base}.top_p",
            ": the rollout samples from a smaller support than the trainer's",
            f"set {base}.top_p=1, or {fix}",
        )
    if get(config, f"{base}.top_k", -1) not in (-1, 0):
        refuse(
            asked,
            config,
            f"{base}.top_k",
            ": the rollout samples from a smaller support than the trainer's",
            f"set {base}.top_k=-1, or {fix}",
        )
    path = f"{base}.engine_kwargs.vllm.override_generation_config.min_p"
    if number(config, path, 0.0) > 0:
        refuse(
            asked,
            config,
            path,
            ": the rollout samples from a smaller support than the trainer's",
            f"remove it, or {fix}",
        )
