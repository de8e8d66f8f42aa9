"""``is_correction``: a job that would leave the correction void, or apply a second one, does not start."""

import pytest

from tests.driver import SWITCHES
from tests.rules.lines import RC, A, R, V, lines, said

# Beside both switches: the correction made void, or doubled.
VOID = [
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
LINES = [
    (f"+is_correction=tis {RC}.rollout_is=null", f"{RC}.rollout_is"),
    (f"+is_correction=tis {RC}=null", f"{RC}.rollout_is"),
    (f"+is_correction=icepop {RC}.rollout_is_threshold=9", f"{RC}.rollout_is_threshold"),
    (f"+is_correction=mis {RC}.bypass_mode=true", f"{RC}.bypass_mode"),
    ("+is_correction=geo_rs is_correction.low=2", "is_correction.low"),
    ("+is_correction=k3_rs is_correction.max_k3=true", "is_correction.max_k3"),
    ("+is_correction=tis is_correction.delta=0.1", "is_correction.delta"),
    (f"+is_correction=none {RC}.rollout_is=token", f"{RC}.rollout_is"),
]


@pytest.mark.parametrize(("overrides", "key"), lines(VOID))
def test_a_correction_without_effect_is_refused_by_name(tiny_model, overrides, key):
    """Every ratio would be 1, or corrected twice, or of two distributions."""
    # A later override of a key wins, as on any command line.
    message = said(tiny_model, [*SWITCHES, *overrides])
    assert message is not None and key in message


@pytest.mark.parametrize(("overrides", "key"), lines(LINES))
def test_verls_own_setting_against_the_method_is_refused_by_name(tiny_model, overrides, key):
    """verl's settings say something else than the method means."""
    message = said(tiny_model, overrides)
    assert message is not None and key in message
