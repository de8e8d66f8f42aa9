"""verl's own methods: each is verl's preset, and an override that makes it another is refused."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from tests.correction.common import BASE, batch, refusal, run, settings
from verl_fp8.correction.verls_methods import rollout_correction, same_setting
from verl_fp8.errors import Fp8Error
from verl_fp8.rules.run import validate_run
from verl_fp8.tools.overrides import compose

# Our method -> verl's preset of the same meaning (verl/trainer/config/algorithm.py).
PRESETS = {
    "tis": "decoupled_token_is",
    "tis_seq": "decoupled_seq_is",
    "icepop": "decoupled_token_icepop",
    "mis": "decoupled_seq_is_rs",
    "geo_rs": "decoupled_geo_rs",
    "k3_rs": "decoupled_k3_rs",
}
VERLS = tuple(PRESETS)


@pytest.mark.parametrize("method", VERLS)
def test_a_method_is_verls_preset(method):
    """Selecting a method gives verl exactly the settings of its documented preset."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    config, summary = run(f"+is_correction={method}")
    preset = dataclasses.asdict(getattr(RolloutCorrectionConfig, PRESETS[method])())
    found = OmegaConf.to_container(config.algorithm.rollout_correction, resolve=True)
    assert summary.correction.method == method
    for key, meant in preset.items():
        if key == "_target_" or (key == "rollout_is_threshold" and preset["rollout_is"] is None):
            continue  # of the class; no weights, no threshold
        assert same_setting(found[key], meant), key


@pytest.mark.parametrize("method", VERLS)
def test_verl_accepts_what_a_method_sets(method):
    """verl's own function takes the composed settings."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    config, _ = run(f"+is_correction={method}")
    node = OmegaConf.to_container(config.algorithm.rollout_correction, resolve=True)
    node = {k: v for k, v in node.items() if k not in ("bypass_mode", "loss_type")}
    train, rollout, _, mask = batch()
    weights, _, metrics = compute_rollout_correction_and_rejection_mask(train, rollout, mask.float(), **node)
    assert (weights is not None) == (node["rollout_is"] is not None)
    assert ("rollout_corr/rollout_rs_masked_fraction" in metrics) == (node["rollout_rs"] is not None)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["+is_correction=tis", "is_correction.clip=3.5"], "rollout_is_threshold", 3.5),
        (["+is_correction=tis_seq", "is_correction.batch_normalize=true"], "rollout_is_batch_normalize", True),
        (["+is_correction=icepop", "is_correction.low=0.25"], "rollout_is_threshold", "0.25_5.0"),
        (["+is_correction=mis", "is_correction.high=4", "is_correction.clip=8"], "rollout_rs_threshold", "0.5_4"),
        (
            ["+is_correction=geo_rs", "is_correction.low=0.99", "is_correction.high=1.01"],
            "rollout_rs_threshold",
            "0.99_1.01",
        ),
        (["+is_correction=k3_rs", "is_correction.max_k3=0.002"], "rollout_rs_threshold", 0.002),
    ],
)
def test_parameters_reach_verl(overrides, key, value):
    """An override of is_correction.* on Hydra's command line changes verl's own setting, and the driver agrees."""
    config = compose([*BASE, *overrides])
    validate_run(config)
    assert config.algorithm.rollout_correction[key] == value


@pytest.mark.parametrize(
    ("method", "override"),
    [
        ("tis", "algorithm.rollout_correction.rollout_is_threshold=3"),
        ("tis", "algorithm.rollout_correction.rollout_is=sequence"),
        ("tis", "algorithm.rollout_correction.rollout_is=null"),
        ("tis", "algorithm.rollout_correction.rollout_is_batch_normalize=true"),
        ("tis", "algorithm.rollout_correction.rollout_rs=token_k1"),
        ("icepop", "algorithm.rollout_correction.rollout_is_threshold=5.0"),
        ("mis", "algorithm.rollout_correction.rollout_rs=seq_mean_k1"),
        ("geo_rs", "algorithm.rollout_correction.rollout_is=token"),
        ("k3_rs", "algorithm.rollout_correction.rollout_rs_threshold=0.02"),
        ("tis", "algorithm.rollout_correction.bypass_mode=true"),
    ],
)
def test_an_override_that_changes_the_method_is_refused(method, override):
    """The command line wins over the group, so the driver compares the result with what the method means."""
    assert override.split("=")[0] in refusal(f"+is_correction={method}", override)


def test_an_override_that_says_the_same_is_accepted():
    """2 is verl's 2.0."""
    run("+is_correction=tis", "algorithm.rollout_correction.rollout_is_threshold=2")


def test_method_by_key_does_not_pass_for_the_group():
    """is_correction.method alone changes no setting of verl, so the run would correct with the old method."""
    assert "algorithm.rollout_correction.rollout_is=token" in refusal(
        "+is_correction=tis", "is_correction.method=tis_seq"
    )


@pytest.mark.parametrize(("found", "meant", "same"), [
    (2, 2.0, True), ("2", 2.0, True), ("0.5_5", "0.5_5.0", True), (None, None, True), (False, False, True),
    (None, 2.0, False), ("0.5_5", 5.0, False), (True, 1.0, True), (True, "1_1", False), ("token", "sequence", False),
])  # fmt: skip
def test_settings_compare_as_verl_reads_them(found, meant, same):
    """Numbers, their strings and low_high strings; Python's True == 1 cannot occur in one key."""
    assert same_setting(found, meant) is same


def test_ais_is_not_one_of_verls_methods():
    """rollout_correction() has nothing to say about it."""
    with pytest.raises(Fp8Error, match="not verl's"):
        rollout_correction(settings())
