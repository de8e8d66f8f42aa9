"""The figures of ``verl-fp8 replay``, against hand-made batches and verl's own metrics."""

import math

import pytest
import torch

from tests.tools.runs.dumps import jagged_batch, padded, step_of
from verl_fp8.correction.ais import AISConfig, ais_weights
from verl_fp8.correction.dump import files, flatten, read_step
from verl_fp8.tools.runs.figures import Profile, Totals, add_profiles, batch_figures, mismatch_figures
from verl_fp8.tools.runs.replay import edges


def test_the_figures_by_hand():
    """Four valid tokens with ratios 1, 2, 4, 1/2 and A = 1, -1, 2, 1; truncated at 2, the last one rejected."""
    ratio = torch.tensor([1.0, 2.0, 4.0, 0.5, 9.0])
    step = step_of(ratio.log().tolist(), [0.0] * 5, [1.0, -1.0, 2.0, 1.0, 7.0], [1, 1, 1, 1, 0], [3, 2])
    weights, kept = torch.tensor([1.0, 2.0, 2.0, 0.5, 1.0]), torch.tensor([True, True, True, False, False])
    found = batch_figures(step, weights, kept, 2.0, Totals())
    v = [1, 2, 2, 0]
    assert found["ess"] == pytest.approx(25 / (4 * 9))
    assert found["weight_mean"] == pytest.approx(5 / 4)
    assert found["weight_max"] == 2.0
    assert found["clip_fraction"] == 0.5  # tokens at the truncation
    assert found["rejected_fraction"] == 0.25
    assert found["bias"] == pytest.approx(
        sum(abs(w - r) * abs(a) for w, r, a in zip(v, (1, 2, 4, 0.5), (1, 1, 2, 1), strict=True)) / 5
    )
    assert found["variance"] == pytest.approx(sum((w * a) ** 2 for w, a in zip(v, (1, 1, 2, 1), strict=True)) / 7)


def test_no_correction_is_unbiased_without_mismatch_and_untruncated_weights_always_are():
    """bias is 0 for the exact token weights, and for none when the log-probs agree; variance of none is 1."""
    data, keys, tags = jagged_batch()
    tensors, _ = flatten(data, keys, tags)
    step = step_of([0.0], [0.0], [0.0], [1], [1])
    step.tensors.clear()
    step.tensors.update(tensors)
    mask = tensors["response_mask"].bool()
    exact = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).double().exp().float()
    # float32 weights: half a unit in the last place of numbers near 1.
    assert batch_figures(step, exact, mask, None, Totals())["bias"] == pytest.approx(0.0, abs=2**-24)
    none = batch_figures(step, torch.ones_like(exact), mask, None, Totals())
    assert none["bias"] > 0.01
    assert (none["variance"], none["ess"]) == (1.0, 1.0)
    step.tensors["rollout_log_probs"] = tensors["old_log_probs"]
    assert batch_figures(step, torch.ones_like(exact), mask, None, Totals())["bias"] == 0.0


def test_pooled_quantiles_are_those_of_all_tokens():
    """The histogram over two batches gives the quantiles of their union to half of a bin of 0.25 %."""
    totals, everything = Totals(), []
    for seed in (1, 2):
        data, keys, tags = jagged_batch(seed=seed, rows=60, spread=0.5)
        tensors, _ = flatten(data, keys, tags)
        step = step_of([0.0], [0.0], [0.0], [1], [1])
        step.tensors.update(tensors)
        mask = tensors["response_mask"].bool()
        weights = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).exp()
        batch_figures(step, weights, mask, None, totals)
        everything.append(weights[mask])
    values = torch.cat(everything)
    for q in (0.99, 0.999):
        rank = min(len(values) - 1, math.ceil(q * len(values)) - 1)
        assert totals.quantile(q) == pytest.approx(values.sort().values[rank].item(), rel=0.0025)
    assert totals.largest == values.max().item()


def test_mismatch_is_verls(dump):
    """k3 and k1 equal verl's own off-policy metrics; float32 there."""
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics

    step = read_step(files(dump)[0])
    _, block = padded(step)
    verl = compute_offpolicy_metrics(block["old_log_probs"], block["rollout_log_probs"], block["response_mask"].float())
    found = mismatch_figures(step)
    assert found["k3"] == pytest.approx(verl["k3_kl"], rel=1e-3)
    assert found["k1"] == pytest.approx(verl["kl"], rel=1e-3)


def test_profiles_by_position_and_length():
    """Two responses of lengths 1 and 3: each token in its place, and alpha of a bin as of a batch of its tokens."""
    d = [0.1, 0.2, -0.3, 0.4]
    step = step_of(d, [0.0] * 4, [1.0, -1.0, 0.5, 2.0], [1, 1, 1, 1], [1, 3])
    by_position, by_length = Profile(AISConfig()), Profile(AISConfig())
    add_profiles(step, by_position, by_length)
    bins = by_position.bins(edges(3, equal=3))
    assert [b["n_tokens"] for b in bins] == [2, 1, 1]
    assert bins[0]["mean_abs"] == pytest.approx(0.15)
    lengths = by_length.bins(edges(4))
    assert [(b["from"], b["to"], b["n_tokens"]) for b in lengths] == [(1, 2, 1), (2, 4, 3)]
    rows = step.tensors
    alone = ais_weights(
        *(rows[n][1:].view(1, 3) for n in ("old_log_probs", "rollout_log_probs", "advantages")), torch.ones(1, 3)
    )
    for key in ("alpha", "alpha_ess", "alpha_mis", "alpha_var"):
        assert lengths[1][key] == pytest.approx(alone.diagnostics[f"ais/{key}"], rel=1e-6), key
