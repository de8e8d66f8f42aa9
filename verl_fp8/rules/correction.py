"""The rules for ``+is_correction=...``: what must hold of the job for a correction to be one."""

from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from verl_fp8.correction.dump import check_folder, run_of
from verl_fp8.correction.reweight import ais_config
from verl_fp8.correction.verls_methods import rollout_correction, same_setting, try_rollout_correction
from verl_fp8.errors import Fp8Error
from verl_fp8.rules import resume
from verl_fp8.rules.asked import Run
from verl_fp8.rules.refuse import Key, Refusal, caught, get, number, off, refusal, table, zero

# Estimators that turn group rewards into one advantage a response, as the paper's experiments do.
GRPO_FAMILY = ("grpo", "grpo_vectorized")
_RC = "algorithm.rollout_correction"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

# Each of these would leave the correction without a ratio to correct, or correct it twice.
_RATIO = (
    Key(
        f"{_RC}.bypass_mode",
        off,
        ": the trainer's log-probs are the rollout's, every ratio would be 1",
        "set it to false",
    ),
    Key(
        f"{_ACTOR}.policy_loss.loss_mode",
        lambda mode: mode != "bypass_mode",
        ", which corrects by itself",
        "set it to vanilla",
    ),
    Key(f"{_ACTOR}.use_rollout_log_probs", off, ": every ratio would be 1", "set it to false"),
    Key(f"{_ROLLOUT}.calculate_log_probs", bool, "", "set {path}=true"),
)
_DISTRIBUTION = (
    Key(
        f"{_ROLLOUT}.logprobs_mode",
        ("processed_logprobs",),
        "; the trainer's are at the sampling temperature",
        "set {path}=processed_logprobs",
        default="processed_logprobs",
    ),
)
_PENALTY = (Key(f"{_ROLLOUT}.repetition_penalty", (1.0,), ": the trainer applies none", "set {path}=1.0", default=1.0),)
_TRUNCATED = ": the rollout samples from a smaller support than the trainer's"
_ALLOW = "switch it off, or set is_correction.allow_truncated_support=true"
_SUPPORT = (
    Key(
        f"{_ROLLOUT}.top_p",
        lambda p: not p < 1.0,
        _TRUNCATED,
        f"set {{path}}=1, or {_ALLOW}",
        default=1.0,
        numeric=True,
    ),
    Key(f"{_ROLLOUT}.top_k", (-1, 0), _TRUNCATED, f"set {{path}}=-1, or {_ALLOW}", default=-1),
    Key(
        f"{_ROLLOUT}.engine_kwargs.vllm.override_generation_config.min_p",
        zero,
        _TRUNCATED,
        f"remove it, or {_ALLOW}",
        default=0.0,
        numeric=True,
    ),
)
_ESTIMATOR = (
    Key(
        "algorithm.adv_estimator",
        lambda estimator: str(estimator) in GRPO_FAMILY,
        f"; AIS is tested with {', '.join(GRPO_FAMILY)}",
        "set {path}=grpo",
    ),
)


def _asked(run: Run) -> str:
    return f"+is_correction={run.correction.method}"


def _corrects_or_dumps(run: Run) -> bool:
    return run.correction.method != "none" or run.correction.dump is not None


def one_correction_only(run: Run) -> Iterator[Refusal]:
    """verl's own correction is what the method means, whoever set it, or there is none beside ours."""
    if run.correction.method in ("ais", "none"):
        why, fix = ", a second correction of the same ratio", "set {path}=null, or remove is_correction"
        yield from table(run.config, _asked(run), [Key(f"{_RC}.rollout_is", (None,), why, fix)])
        return
    try:
        meant_by_method = rollout_correction(run.correction)
    except Fp8Error as error:
        yield Refusal.of(error)
        return
    for key, meant in meant_by_method.items():
        path = f"{_RC}.{key}"
        if not same_setting(get(run.config, path), meant):
            fix = f"remove the override of {path}; is_correction.* sets the method's values"
            yield refusal(run.config, _asked(run), path, f", where {run.correction.method} means {meant}", fix)


def there_is_a_ratio(run: Run) -> Iterator[Refusal]:
    """Trainer and rollout each give log-probs, and nothing else uses them up."""
    if _corrects_or_dumps(run):
        yield from table(run.config, _asked(run), _RATIO)


def one_distribution(run: Run) -> Iterator[Refusal]:
    """Log-probs of trainer and rollout are of one distribution over one support."""
    if run.correction.method == "none":
        return
    asked = _asked(run)
    yield from table(run.config, asked, _DISTRIBUTION)
    try:
        yield from _sampled(run, asked)
    except Fp8Error as error:
        yield Refusal.of(error)
    yield from table(run.config, asked, _PENALTY)
    if not run.correction.allow_truncated_support:
        yield from table(run.config, asked, _SUPPORT)


def _sampled(run: Run, asked: str) -> Iterator[Refusal]:
    samples = get(run.config, f"{_ROLLOUT}.do_sample", True)
    if not samples or number(run.config, f"{_ROLLOUT}.temperature", 1.0) <= 0:
        path = f"{_ROLLOUT}.temperature" if samples else f"{_ROLLOUT}.do_sample"
        fix = f"set {_ROLLOUT}.do_sample=true and temperature=1"
        yield refusal(run.config, asked, path, ": greedy answers are no samples of the policy", fix)


def ais_has_what_it_needs(run: Run) -> Iterator[Refusal]:
    """AIS: constants in range, group advantages that the loss reads, and rejection sampling that verl takes."""
    if run.correction.method != "ais":
        return
    config, asked = run.config, _asked(run)
    yield from caught(ais_config, run.correction)
    yield from table(config, asked, _ESTIMATOR)
    path = "distillation.distillation_loss.use_task_rewards"
    if get(config, "distillation.enabled", False) and not get(config, path, True):
        fix = f"set {path}=true, or remove is_correction"
        yield refusal(config, asked, path, ": the loss reads no advantages", fix)
    node = OmegaConf.to_container(config.algorithm.get("rollout_correction") or OmegaConf.create(), resolve=True)
    if node.get("rollout_rs") is None:
        return
    try:
        try_rollout_correction(node)
    except (TypeError, ValueError) as error:
        found = f"rollout_rs={node['rollout_rs']}, rollout_rs_threshold={node.get('rollout_rs_threshold')} ({error})"
        fix = "correct algorithm.rollout_correction.rollout_rs or rollout_rs_threshold"
        yield Refusal(f"{asked} with rejection sampling", found, fix, cause=error)


def mini_batches_are_the_actors(run: Run) -> Iterator[Refusal]:
    """AIS a mini-batch: the rows that the actor will step on together are known beforehand."""
    if run.correction.method != "ais" or run.correction.scope != "mini_batch":
        return
    config, asked, fix = run.config, "is_correction.scope=mini_batch", "set is_correction.scope=batch"
    path = f"{_ACTOR}.shuffle"
    if get(config, path, False) and number(config, f"{_ACTOR}.ppo_epochs", 1) > 1:
        why = ": each of several ppo_epochs forms other mini-batches of the same rows"
        yield refusal(config, asked, path, why, f"set {path}=false or ppo_epochs=1, or {fix}")
    path = "trainer.critic_warmup"
    if number(config, path, 0) > 0:
        yield refusal(config, asked, path, ": batches that the actor never cuts", f"set {path}=0, or {fix}")


def the_dump_is_this_runs(run: Run) -> Iterator[Refusal]:
    """The dump's folder is empty, or holds the run that is resumed."""
    if run.correction.dump is not None:
        resumed = resume.resumed(run.config.trainer) is not None
        yield from caught(check_folder, Path(run.correction.dump.folder), run_of(run.config), resumed=resumed)


RULES = (
    one_correction_only,
    there_is_a_ratio,
    one_distribution,
    ais_has_what_it_needs,
    mini_batches_are_the_actors,
    the_dump_is_this_runs,
)
