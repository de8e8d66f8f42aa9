"""AIS between mathematics and trainer: delta=auto, the moving average, mini-batches, what changes."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests.correction.common import batch, run, settings
from verl_fp8.correction.ais import AISConfig, ais_weights, apply_weights
from verl_fp8.correction.reweight import AISState, MiniBatches, ais_config, change, reweight
from verl_fp8.errors import ConfigError
from verl_fp8.switches.settings import CorrectionSettings

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
