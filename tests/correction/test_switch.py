"""What the group ``is_correction`` refuses on the driver: wrong values, and settings that contradict it."""

import pytest

from tests.correction.common import BASE, refusal, run
from verl_fp8.switches.settings import METHOD_KEYS
from verl_fp8.tools.overrides import compose

METHODS_OF_VERL = tuple(method for method in METHOD_KEYS if method not in ("ais", "none"))


def test_an_unknown_method_lists_the_known_ones():
    """By the key and by the group, the sentence names every method."""
    sentence = refusal("+is_correction=ais", "is_correction.method=foo")
    assert all(method in sentence for method in METHOD_KEYS)
    with pytest.raises(ValueError, match="icepop"):
        compose([*BASE, "+is_correction=foo"])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["+is_correction=tis", "+is_correction.delta=1"], "is_correction.delta"),
        (["+is_correction=tis", "+is_correction.scope=batch"], "is_correction.scope"),
        (["+is_correction=tis", "is_correction.clip=-1"], "is_correction.clip"),
        (["+is_correction=tis", "is_correction.clip=auto"], "is_correction.clip"),
        (["+is_correction=tis", "is_correction.batch_normalize=3"], "is_correction.batch_normalize"),
        (["+is_correction=icepop", "is_correction.low=9"], "is_correction.low"),
        (["+is_correction=k3_rs", "is_correction.max_k3=0"], "is_correction.max_k3"),
        (["+is_correction=ais", "is_correction.scope=micro_batch"], "is_correction.scope"),
        (["+is_correction=ais", "is_correction.mode=on"], "is_correction.mode"),
        (["+is_correction=ais", "is_correction.delta=often"], "is_correction.delta"),
        (["+is_correction=ais", "is_correction.delta_steps=0"], "is_correction.delta_steps"),
        (["+is_correction=ais", "is_correction.delta_factor=0"], "is_correction.delta_factor"),
        (["+is_correction=ais", "is_correction.ema=1"], "is_correction.ema"),
        (["+is_correction=ais", "is_correction.dump=3"], "is_correction.dump"),
        (["+is_correction=ais", "is_correction.dump=d", "is_correction.dump_steps=-1"], "is_correction.dump_steps"),
        (
            ["+is_correction=ais", "is_correction.dump=d", "is_correction.dump_max_bytes=1e9"],
            "is_correction.dump_max_bytes",
        ),
    ],
)
def test_a_wrong_value_names_its_key(overrides, named):
    """Every bad value dies on the driver, in one sentence with the key."""
    assert named in refusal(*overrides)


@pytest.mark.parametrize("method", ["ais", "none"])
def test_two_corrections_of_one_ratio_are_refused(method):
    """verl's rollout_is beside AIS, or beside an explicit none."""
    override = "algorithm.rollout_correction.rollout_is=token"
    assert "algorithm.rollout_correction.rollout_is=token" in refusal(f"+is_correction={method}", override)


@pytest.mark.parametrize("method", ["ais", *METHODS_OF_VERL])
@pytest.mark.parametrize(
    "override",
    [
        "algorithm.rollout_correction.bypass_mode=true",
        "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.rollout.top_k=20",
    ],
)
def test_what_makes_the_ratio_meaningless_is_refused(method, override):
    """Whatever the method, the two log-probs must be there and be of one distribution."""
    assert override.split("=")[0] in refusal(f"+is_correction={method}", override)


def test_verls_methods_take_other_estimators():
    """verl applies its weights in the loss, whatever the advantages are; AIS is tested with GRPO only."""
    run("+is_correction=tis", "algorithm.adv_estimator=gae")
    assert "algorithm.adv_estimator" in refusal("+is_correction=ais", "algorithm.adv_estimator=gae")


def test_ais_goes_with_rejection_sampling():
    """verl's rollout_rs beside AIS is allowed, and judged by verl on the driver."""
    keys = ["+is_correction=ais", "algorithm.rollout_correction.rollout_rs=seq_mean_k3"]
    run(*keys, "algorithm.rollout_correction.rollout_rs_threshold=0.01")
    assert "rollout_rs_threshold" in refusal(*keys)
    assert "rollout_rs_threshold" in refusal(*keys, "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0")


def test_mini_batches_that_change_are_refused():
    """Shuffling anew in every epoch leaves no one alpha for a row; shuffling once does."""
    keys = ["+is_correction=ais", "is_correction.scope=mini_batch"]
    run(*keys, "actor_rollout_ref.actor.shuffle=true")
    run(*keys, "actor_rollout_ref.actor.ppo_epochs=2")
    assert "actor.shuffle" in refusal(
        *keys, "actor_rollout_ref.actor.shuffle=true", "actor_rollout_ref.actor.ppo_epochs=2"
    )
    assert "trainer.critic_warmup" in refusal(*keys, "trainer.critic_warmup=3")
