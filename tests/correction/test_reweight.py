"""The group ``is_correction``: what each method means, what is refused on the driver, and AIS between mathematics and
trainer."""

import contextlib
import copy
import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl_fp8.correction.ais import AISConfig, ais_weights, apply_weights
from verl_fp8.correction.reweight import AISState, MiniBatches, ais_config, change, reweight
from verl_fp8.correction.verls_methods import rollout_correction, same_setting
from verl_fp8.errors import ConfigError, Fp8Error
from verl_fp8.rules.run import validate_run
from verl_fp8.switches.settings import METHOD_KEYS, CorrectionSettings
from verl_fp8.tools.overrides import compose

# What a run on any machine sets; the model is not looked at without +fp8.
BASE = ["actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.rollout.name=vllm", "algorithm.adv_estimator=grpo"]

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


composed = functools.cache(lambda group: compose([*BASE, group]))


def configured(group, *overrides):
    """A group composed through Hydra as verl's entry point does, then overrides, which Hydra too applies last."""
    config = copy.deepcopy(composed(group))
    for override in overrides:
        key, value = override.lstrip("+").split("=", 1)
        OmegaConf.update(
            config, key, OmegaConf.from_dotlist([f"value={value}"]).value, force_add=override.startswith("+")
        )
    return config


def run(group, *overrides):
    """The configuration, and what the driver's checks return for it."""
    config = configured(group, *overrides)
    return config, validate_run(config)


def refusal(group, *overrides):
    """The sentence the driver refuses with."""
    config = configured(group, *overrides)
    with pytest.raises(ConfigError) as caught:
        validate_run(config)
    return str(caught.value)


def batch(rows=8, length=16, seed=0, spread=0.05):
    """A padded batch: trainer's and rollout's log-probs, advantages, mask."""
    g = torch.Generator().manual_seed(seed)
    train = -torch.rand(rows, length, generator=g) * 3
    rollout = train + spread * torch.randn(rows, length, generator=g)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=g)
    return train, rollout, torch.randn(rows, 1, generator=g).expand(rows, length) * mask, mask


def settings(**node):
    """Parsed AIS settings."""
    return CorrectionSettings.parse({"method": "ais", **node})


# ---------------------------------------------------------------- verl's own methods


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


# ---------------------------------------------------------------- wrong input


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


# ---------------------------------------------------------------- conflicts


@pytest.mark.parametrize("method", ["ais", "none"])
def test_two_corrections_of_one_ratio_are_refused(method):
    """verl's rollout_is beside AIS, or beside an explicit none."""
    override = "algorithm.rollout_correction.rollout_is=token"
    assert "algorithm.rollout_correction.rollout_is=token" in refusal(f"+is_correction={method}", override)


@pytest.mark.parametrize("method", ["ais", *VERLS])
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


# ---------------------------------------------------------------- delta=auto


def test_delta_auto_is_a_multiple_of_the_noise_floor():
    """The floor is the mean over the first steps and then stays; both are logged."""
    auto, state = settings(delta="auto", delta_factor=2.0, delta_steps=2), AISState()
    assert state.delta(auto, 1, 0.01) == (
        0.02,
        {"ais/delta": 0.02, "ais/noise_floor": 0.01, "ais/noise_floor_steps": 1.0},
    )
    delta, metrics = state.delta(auto, 2, 0.03)
    assert delta == pytest.approx(0.04)
    assert metrics["ais/noise_floor_steps"] == 2.0
    assert state.delta(auto, 3, 5.0) == (delta, metrics)


def test_delta_auto_counts_steps_not_batches():
    """With several batches a step (parameter_sync_step) all of a step's batches count."""
    auto, state = settings(delta="auto", delta_steps=1), AISState()
    state.delta(auto, 7, 0.01)
    assert state.delta(auto, 7, 0.03)[1]["ais/noise_floor"] == pytest.approx(0.02)
    assert state.delta(auto, 8, 1.0)[1]["ais/noise_floor"] == pytest.approx(0.02)


def test_delta_auto_is_measured_anew_after_a_resume():
    """The state is the process's: a resumed run at step 100 starts at its own first step, and the metric says so."""
    _, metrics = AISState().delta(settings(delta="auto", delta_steps=5), 100, 0.01)
    assert metrics["ais/noise_floor_steps"] == 1.0


@pytest.mark.parametrize("floor", [0.0, None])
def test_delta_auto_without_any_noise(floor):
    """Bit-identical engines, or a first batch without tokens: any later difference is above the floor."""
    delta, _ = AISState().delta(settings(delta="auto"), 1, floor)
    assert 0 < delta < 1e-9


def test_a_number_is_used_as_it_is():
    """delta=0.05 needs no measurement."""
    assert AISState().delta(settings(delta=0.05), 1, 0.5) == (0.05, {"ais/delta": 0.05})


def test_at_the_floor_half_the_correction():
    """delta_factor 2: on the batch that is the floor alpha_mis is exactly 1/2."""
    train, rollout, advantages, mask = batch()
    floor = ais_weights(train, rollout, advantages, mask).diagnostics["ais/mean_abs_logp_diff"]
    auto = settings(delta="auto")
    delta, _ = AISState().delta(auto, 1, floor)
    found = ais_weights(train, rollout, advantages, mask, ais_config(auto, delta)).diagnostics
    assert found["ais/alpha_mis"] == pytest.approx(0.5, rel=1e-12)


# ---------------------------------------------------------------- the moving average


def test_the_moving_average_of_alpha():
    """alpha = ema * previous + (1 - ema) * own, from the second batch on; the own one stays visible."""
    first, second = batch(seed=1), batch(seed=2)
    own = [ais_weights(*b).alpha for b in (first, second)]
    config, alpha = AISConfig(ema=0.9), None
    smoothed = []
    for b in (first, second):
        result, alpha = reweight(*b, config, previous_alpha=alpha)
        smoothed.append(result)
    assert smoothed[0].alpha == own[0]
    assert smoothed[1].alpha == pytest.approx(0.9 * own[0] + 0.1 * own[1], rel=1e-12)
    assert smoothed[1].diagnostics["ais/alpha_batch"] == own[1]
    wbar = (second[0] - second[1]).exp().clamp(max=5.0)
    meant = torch.where(second[3], 1 + smoothed[1].alpha * (wbar - 1), 1.0)
    # float32 weights: one rounding of numbers near 1.
    assert torch.allclose(smoothed[1].weights, meant, rtol=0, atol=2**-22)


def test_the_moving_average_is_off_by_default():
    """A previous alpha changes nothing while ema is 0, bit for bit."""
    b = batch()
    plain, given = ais_weights(*b), ais_weights(*b, AISConfig(), 0.123)
    assert torch.equal(plain.weights, given.weights)
    assert plain.diagnostics == given.diagnostics


# ---------------------------------------------------------------- mini-batches


def rows_verl_trains_on(n_rows, size, dp_size, shuffle, seed):
    """Run verl's own TrainingWorker.train_mini_batch on every rank's part of a batch, and note the rows of each
    update."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import TrainingWorker

    updates = []
    for rank in range(dp_size):
        seen = []

        class Engine:
            def get_data_parallel_size(self):
                return dp_size

            def get_data_parallel_rank(self, rank=rank):
                return rank

            def train_mode(self, **_):
                return contextlib.nullcontext()

            def is_mp_src_rank_with_outputs(self):
                return False

        worker = SimpleNamespace(
            engine=Engine(),
            train_batch=lambda data, seen=seen: seen.append(data["row"]),
            profiler=SimpleNamespace(step=lambda: None),
        )
        part = torch.arange(n_rows).chunk(dp_size)[rank]
        data = tu.get_tensordict(
            {"row": part},
            {"mini_batch_size": size, "epochs": 1, "seed": seed, "dataloader_kwargs": {"shuffle": shuffle}},
        )
        assert isinstance(data, TensorDict)
        train_mini_batch = TrainingWorker.train_mini_batch
        while hasattr(train_mini_batch, "__wrapped__"):
            train_mini_batch = train_mini_batch.__wrapped__
        train_mini_batch(worker, data)
        updates.append(seen)
    return [torch.cat(parts) for parts in zip(*updates, strict=True)]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_mini_batches_are_those_verl_forms(dp_size, shuffle):
    """The rows of every optimizer step, against verl's own worker loop, with and without shuffling, on 1, 2 and 4
    ranks."""
    verl = rows_verl_trains_on(48, 16, dp_size, shuffle, 7)
    ours = MiniBatches(size=16, dp_size=dp_size, shuffle=shuffle, seed=7).rows(48)
    assert len(ours) == len(verl) == 3
    assert all(torch.equal(a, b) for a, b in zip(ours, verl, strict=True))
    assert sorted(torch.cat(ours).tolist()) == list(range(48))


def test_mini_batches_must_divide():
    """verl pads its batches until they do; anything else is not guessed at."""
    with pytest.raises(ConfigError, match="mini_batch"):
        MiniBatches(size=16).rows(40)


def test_each_mini_batch_has_its_own_alpha():
    """The weights of a mini-batch are those of AIS on its rows alone, in place."""
    b = batch(rows=12, seed=3)
    rows = MiniBatches(size=4, shuffle=True, seed=1).rows(12)
    result, last = reweight(*b, AISConfig(), rows)
    alone = [ais_weights(*(tensor[row] for tensor in b)) for row in rows]
    for row, one in zip(rows, alone, strict=True):
        assert torch.equal(result.weights[row], one.weights)
    tokens = [float(b[3][row].sum()) for row in rows]
    found = result.diagnostics
    assert found["ais/alpha"] == pytest.approx(
        sum(n * a.alpha for n, a in zip(tokens, alone, strict=True)) / sum(tokens), rel=1e-12
    )
    assert (found["ais/alpha_min"], found["ais/alpha_max"]) == (
        min(a.alpha for a in alone),
        max(a.alpha for a in alone),
    )
    assert found["ais/mini_batches"] == 3.0
    assert last == alone[-1].alpha
    assert found["ais/n_tokens"] == sum(tokens)
    assert found["ais/weight_max"] == float(result.weights[b[3]].max())


def test_one_mini_batch_is_the_batch():
    """With a single optimizer step a batch the two scopes are one, bit for bit."""
    b = batch()
    whole, _ = reweight(*b, AISConfig())
    mini, _ = reweight(*b, AISConfig(), [torch.arange(8)])
    assert torch.equal(whole.weights, mini.weights)
    for key, value in whole.diagnostics.items():
        assert mini.diagnostics[key] == pytest.approx(value, rel=1e-6), key  # weights once from alpha, once as float32


def test_a_mini_batch_of_padding_rows():
    """verl may fill a mini-batch with rows of mask 0: weight 1, alpha 0, nothing else changes."""
    train, rollout, advantages, mask = batch()
    mask = mask.clone()
    mask[4:] = False
    result, _ = reweight(train, rollout, advantages * mask, mask, AISConfig(), [torch.arange(4), torch.arange(4, 8)])
    assert bool((result.weights[4:] == 1).all())
    alone = ais_weights(train[:4], rollout[:4], (advantages * mask)[:4], mask[:4])
    assert result.diagnostics["ais/alpha"] == pytest.approx(alone.alpha, rel=1e-12)  # n * alpha / n


# ---------------------------------------------------------------- what changes


def test_change_is_measured_on_the_advantages():
    """By hand: of |A| = 4 in all, 0.5 * |1| + 1 * |-1| is moved; two of three tokens differ."""
    advantages = torch.tensor([[1.0, -1.0, 2.0, 9.0]])
    weights = torch.tensor([[1.5, 2.0, 1.0, 7.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    found = change(advantages, weights, mask)
    assert found == {"ais/advantage_change": 1.5 / 4, "ais/changed_fraction": pytest.approx(2 / 3)}


def test_nothing_changes_without_advantages():
    """A batch whose groups all agree has A = 0 everywhere."""
    assert change(torch.zeros(2, 3), torch.full((2, 3), 2.0), torch.ones(2, 3)) == {
        "ais/advantage_change": 0.0,
        "ais/changed_fraction": 0.0,
    }


def test_ais_is_not_one_of_verls_methods():
    """rollout_correction() has nothing to say about it."""
    with pytest.raises(Fp8Error, match="not verl's"):
        rollout_correction(settings())


def test_stated_defaults_are_the_code_defaults():
    """conf/is_correction/ais.yaml spells out AISConfig's and CorrectionSettings' own defaults."""
    _, summary = run("+is_correction=ais")
    assert ais_config(summary.correction) == AISConfig()
    assert dataclasses.replace(summary.correction, parameters={}) == CorrectionSettings()


def test_apply_is_what_the_loss_would_do():
    """verl's clipped loss on A' equals its loss on A with rollout_is_weights = w."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import ActorConfig

    train, rollout, advantages, mask = batch()
    new = train + 0.3 * torch.randn(train.shape, generator=torch.Generator().manual_seed(9))
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=3.0)
    w = ais_weights(train, rollout, advantages, mask).weights
    weighted, _ = compute_policy_loss_vanilla(train, new, advantages, mask.float(), config=config, rollout_is_weights=w)
    ours, _ = compute_policy_loss_vanilla(train, new, apply_weights(advantages, w), mask.float(), config=config)
    # One float32 product is taken at another place.
    assert ours.item() == pytest.approx(weighted.item(), rel=1e-5)
