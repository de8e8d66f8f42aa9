"""AIS weights: the paper's numbers, a plain float64 reference, the promised invariances, and verl's own code."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fp8.correction import ais
from verl_fp8.correction.ais import AISConfig, ais_weights, apply_weights
from verl_fp8.errors import ConfigError, DataError

# The metrics of shared/design/03-ais.md: what the reference below gives, in its order, and the rest.
NAMES = (
    "alpha alpha_ess alpha_mis alpha_var mean_abs_logp_diff cv ess_ratio variance_ratio clip_fraction "
    "weight_min weight_mean weight_max weight_positive_advantage weight_negative_advantage n_tokens nonfinite_tokens"
).split()
METRICS = {f"ais/{name}" for name in [*NAMES, "abs_logp_diff_p99", "abs_logp_diff_p999", "active"]}

F32_ULP = 2.0**-23  # spacing of float32 relative to the value, at most
# Float64 sums of up to 1e4 terms: 1e4 * 2^-53 = 1e-12, ten times that because std and ratios pile such errors up.
F64_SUMS = 1e-11


def from_wbar(wbar, advantages):
    """Arguments of `ais_weights`, one row, whose ratios are `wbar`."""
    train, advantages = torch.tensor([wbar, advantages], dtype=torch.float64)[:, None]
    return train.log(), torch.zeros_like(train), advantages, torch.ones_like(train)


def make_batch(seed, rows=4, length=24, spread=0.1, shift=0.0, offset=0.0):
    """A GRPO-like batch: one advantage a row, ragged mask, float32."""
    gen = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, length, generator=gen)
    train = rollout + spread * torch.randn(rows, length, generator=gen) + shift
    advantages = (torch.randn(rows, 1, generator=gen) + offset).expand(rows, length).clone()
    lengths = torch.randint(2, length + 1, (rows, 1), generator=gen)
    return train, rollout, advantages, (torch.arange(length) < lengths).long()


def reference(train, rollout, advantages, mask, config):
    """The page of formulas, token level, written down naively: select, then float64."""
    keep = mask != 0
    diff, a = (train - rollout)[keep], advantages[keep].double()
    rho = diff.clamp(-20, 20).exp()  # float32, as the weights are
    wbar = rho.clamp(max=config.clip).double()
    cv = (wbar.std() / wbar.mean()).item()
    dbar = diff.double().abs().mean().item()
    dsig = ((a * wbar).std() / (a.std() + config.eps)).item()
    ess, mis, var = (1 + cv**2) ** -0.5, min(1, dbar / config.delta), max(0, (dsig - config.gamma) / config.gamma)
    alpha = min(1, max(0, ess - config.beta_var * var)) * mis
    w = 1 + alpha * (wbar - 1)
    kish, clipped = wbar.sum() ** 2 / (len(wbar) * wbar.square().sum()), (rho > config.clip).double().mean()
    by_sign = [w[chosen].mean() if chosen.any() else 1.0 for chosen in (a > 0, a < 0)]
    values = (alpha, ess, mis, var, dbar, cv, kish, dsig, clipped, w.min(), w.mean(), w.max(), *by_sign, len(wbar), 0)
    return {f"ais/{name}": float(value) for name, value in zip(NAMES, values, strict=True)}


def test_worked_example():
    """The only numbers the paper publishes, to its three decimals."""
    args = from_wbar([0.8, 1.0, 1.2, 2.0], [1.2, 0.4, -0.2, -0.8])
    result = ais_weights(*args)
    keys = ("cv", "alpha_ess", "variance_ratio", "alpha_var", "alpha_mis", "alpha")
    found = [result.diagnostics[f"ais/{key}"] for key in keys]
    assert found == pytest.approx([0.421, 0.922, 1.290, 0.075, 1.0, 0.847], abs=5e-4)
    assert result.weights[0].tolist() == pytest.approx([0.831, 1.000, 1.169, 1.847], abs=5e-4)
    reweighted = apply_weights(args[2], result.weights)
    assert reweighted[0].tolist() == pytest.approx([0.997, 0.400, -0.234, -1.478], abs=5e-4)


@pytest.mark.parametrize(("dbar", "a_mis"), [(0.0, 0.0), (0.002, 0.10), (0.010, 0.50), (0.020, 1.0), (0.3, 1.0)])
def test_mismatch_gate(dbar, a_mis):
    """a_mis rises linearly with dbar and saturates at delta (the page's table)."""
    diagnostics = ais_weights(*from_wbar([math.exp(dbar), math.exp(-dbar)], [1.0, -1.0])).diagnostics
    assert diagnostics["ais/mean_abs_logp_diff"] == pytest.approx(dbar, rel=F32_ULP)
    assert diagnostics["ais/alpha_mis"] == pytest.approx(a_mis, rel=F32_ULP)


@pytest.mark.parametrize(("dsig", "a_var"), [(1.0, 0.0), (1.2, 0.0), (1.5, 0.25), (2.4, 1.0)])
def test_variance_gate(dsig, a_var):
    """a_var starts at gamma (the page's table) and is what alpha loses; equal ratios give Dsig = ratio, CV = 0."""
    diagnostics = ais_weights(*from_wbar([dsig] * 2, [1.0, -1.0])).diagnostics
    # Dsig is off by eps / std(A) = 1e-6 / sqrt(2), a_var by that over gamma.
    assert diagnostics["ais/variance_ratio"] == pytest.approx(dsig, rel=1e-6)
    assert diagnostics["ais/alpha_var"] == pytest.approx(a_var, abs=2.4e-6 / 1.2)
    if dsig > 1.0:
        assert diagnostics["ais/alpha"] == pytest.approx(1 - a_var, abs=2.4e-6 / 1.2)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 6), st.integers(2, 40)),
    spread=st.sampled_from([1e-3, 0.05, 1.0, 8.0]),
    shift=st.sampled_from([0.0, 0.3, -0.3]),
    config=st.builds(AISConfig, clip=st.sampled_from([5.0, 1.05, 0.9]), beta_var=st.sampled_from([0.0, 0.3])),
)
def test_reference(seed, shape, spread, shift, config):
    """alpha, weights and every metric agree with the naive float64 reference."""
    batch = make_batch(seed, *shape, spread, shift)
    batch[2].add_(torch.randn(batch[2].shape, generator=torch.Generator().manual_seed(seed)))  # not constant
    batch[2][:, 1::5] = 0.0  # neither positive nor negative
    result, expected = ais_weights(*batch, config), reference(*batch, config)
    assert set(result.diagnostics) == METRICS
    for key, value in expected.items():
        assert result.diagnostics[key] == pytest.approx(value, rel=F64_SUMS, abs=F64_SUMS), key
    keep = batch[3] != 0
    assert result.alpha == result.diagnostics["ais/alpha"]
    assert result.weights[keep].min().item() == pytest.approx(expected["ais/weight_min"], rel=F32_ULP)
    assert result.weights[keep].max().item() == pytest.approx(expected["ais/weight_max"], rel=F32_ULP)
    assert (result.weights[~keep] == 1.0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equal_log_probs_change_nothing(dtype):
    """Equal log-probs give weight 1 and leave every bit of A, even where the truncation lies below 1."""
    train, _, advantages, mask = (x.to(dtype) for x in make_batch(0))
    advantages[0, 0] = -0.0
    result = ais_weights(train, train, advantages, mask, AISConfig(clip=0.5))
    assert result.weights.dtype == torch.float32
    assert torch.equal(result.weights, torch.ones_like(result.weights))
    assert apply_weights(advantages, result.weights).view(torch.uint8).equal(advantages.view(torch.uint8))
    assert result.diagnostics["ais/active"] == 0.0


def test_alpha_zero_by_variance_leaves_advantages_alone():
    """A correction that would inflate the gradient too much is switched off, to the bit."""
    result = ais_weights(*from_wbar([4.0, 4.5, 3.5], [1.0, -1.0, 0.3]))
    assert result.alpha == 0.0
    assert result.diagnostics["ais/alpha_mis"] == 1.0
    assert result.weights.equal(torch.ones(1, 3))


@pytest.mark.parametrize(("diff", "clip"), [(0.5, 5.0), (-3.0, 5.0), (3.0, 5.0), (0.5, 1.1), (-25.0, 5.0)])
def test_alpha_one_is_truncated_importance_sampling(diff, clip):
    """At alpha = 1 the weight is min(rho, C) exactly; alpha is 1 only where all ratios agree."""
    diffs = torch.full((2, 5), diff)
    result = ais_weights(diffs, torch.zeros(2, 5), torch.ones(2, 5), torch.ones(2, 5), AISConfig(clip=clip))
    assert result.alpha == 1.0
    assert result.weights.equal(diffs.clamp(-20, 20).exp().clamp(max=clip))


def test_weights_mix_verls_token_weights_with_one():
    """w = 1 + alpha * (t - 1), where t are the weights verl computes for rollout_is=token at the same threshold."""
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    train, rollout, advantages, mask = make_batch(1, rows=16, length=300, spread=1.2)
    verl_weights, _ = helper.compute_rollout_correction_weights(train - rollout, mask, "token", 5.0)
    assert (verl_weights == 5.0).any()
    result = ais_weights(train, rollout, advantages, mask, AISConfig(beta_var=0.0))
    assert 0.1 < result.alpha < 0.9
    keep = mask != 0
    mixed = (1 + result.alpha * (verl_weights[keep].double() - 1)).float()
    # Two ways to write the float64 mixture, which differ by 2^-52 and so may round to neighbouring float32.
    assert torch.allclose(result.weights[keep], mixed, rtol=F32_ULP, atol=0.0)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("block", [1, 50, 1 << 17])
def test_invariances(monkeypatch, offset, block):
    """Permuting, padding and cutting the batch changes nothing beyond float64 rounding, even where mean >> std."""
    batch = make_batch(2, rows=40, length=30, spread=0.05, offset=offset)
    expected = ais_weights(*batch)
    monkeypatch.setattr(ais, "_BLOCK", block)
    gen = torch.Generator().manual_seed(0)
    rows, columns = torch.randperm(40, generator=gen), torch.randperm(30, generator=gen)
    padded = [torch.nn.functional.pad(x[rows][:, columns], (2, 5, 1, 3), value=0) for x in batch]
    result = ais_weights(*padded)
    assert result.diagnostics == pytest.approx(expected.diagnostics, rel=F64_SUMS)
    restored = result.weights[1:-3, 2:-5][rows.argsort()][:, columns.argsort()]
    assert torch.allclose(restored, expected.weights, rtol=F32_ULP, atol=0.0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("level", ais.LEVELS)
def test_masked_garbage_does_not_leak(garbage, level):
    """Whatever lies under mask = 0, the result is the same to the bit."""
    clean = make_batch(4)
    for index in range(3):
        dirty = [x.clone() for x in clean]
        dirty[index][clean[3] == 0] = garbage
        expected, result = (ais_weights(*batch, AISConfig(level=level)) for batch in (clean, dirty))
        assert result.diagnostics == expected.diagnostics
        assert result.weights.equal(expected.weights)
        assert expected.diagnostics["ais/active"] == 1.0


@pytest.mark.parametrize("level", ais.LEVELS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_log_probs(level, bad):
    """A token with a non-finite log-prob counts as masked out, gets weight 1 and is reported."""
    batch = make_batch(5, rows=20)
    without = [x.clone() for x in batch]
    batch[0][3, 0] = batch[1][7, 0] = batch[0][8, 0] = batch[1][8, 0] = bad  # row 8: inf - inf
    without[3][[3, 7, 8], 0] = 0
    config = AISConfig(level=level, max_nonfinite_fraction=0.05)
    result, expected = ais_weights(*batch, config), ais_weights(*without, config)
    assert result.diagnostics == expected.diagnostics | {"ais/nonfinite_tokens": 3.0}
    assert result.weights.equal(expected.weights)
    assert (result.weights[[3, 7, 8], 0] == 1.0).all()


def test_too_many_nonfinite_log_probs_raise():
    """Above the tolerated share the batch is refused, and the message names the count and the key; at it, it is not."""
    batch = (*make_batch(6, rows=10, length=10)[:3], torch.ones(10, 10))
    batch[0][0, :2] = math.nan
    with pytest.raises(DataError, match=r"2 NaN.*among 100.*is_correction\.max_nonfinite_fraction"):
        ais_weights(*batch)
    at_limit = ais_weights(*batch, AISConfig(max_nonfinite_fraction=0.02))
    assert at_limit.diagnostics["ais/nonfinite_tokens"] == 2.0


def test_nonfinite_advantages_raise():
    """A valid advantage that is not finite is refused, also under a token whose log-prob is not finite either."""
    train, rollout, advantages, mask = make_batch(7)
    advantages[0, 0] = math.inf
    with pytest.raises(DataError, match="advantages"):
        ais_weights(train, rollout, advantages, mask)
    train[0, 0] = math.nan
    with pytest.raises(DataError, match="advantages"):
        ais_weights(train, rollout, advantages, mask, AISConfig(max_nonfinite_fraction=1.0))


@pytest.mark.parametrize(("n", "shape"), [(0, (3, 4)), (1, (3, 4)), (0, (0, 4)), (0, (3, 0))])
def test_too_few_tokens(n, shape):
    """Fewer than two valid tokens: no std, so alpha 0, weights 1, and no NaN in any metric."""
    mask = torch.zeros(shape)
    mask.view(-1)[5 : 5 + n] = 1
    result = ais_weights(torch.randn(shape), torch.randn(shape), torch.randn(shape), mask)
    assert result.alpha == 0.0
    assert result.weights.equal(torch.ones(shape))
    assert set(result.diagnostics) == METRICS
    assert all(math.isfinite(value) for value in result.diagnostics.values())
    assert result.diagnostics["ais/n_tokens"] == n


@pytest.mark.parametrize("value", [0.0, 0.1, -1e4 / 3])
def test_constant_advantages(value):
    """Constant advantages give Dsig = 1 instead of x / eps, which would switch the batch off."""
    train, rollout, advantages, mask = make_batch(8, rows=50)
    result = ais_weights(train, rollout, advantages.fill_(value), mask)
    assert result.diagnostics["ais/variance_ratio"] == 1.0
    assert result.alpha == result.diagnostics["ais/alpha_ess"]
    advantages[0, 0] += 1e-3
    assert ais_weights(train, rollout, advantages, mask).diagnostics["ais/variance_ratio"] != 1.0


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.1, 3.0, 30.0]), clip=st.sampled_from([5.0, 0.5]))
def test_signs_never_flip(seed, spread, clip):
    """Weights stay positive, so no advantage changes sign or vanishes."""
    batch = make_batch(seed, spread=spread)
    result = ais_weights(*batch, AISConfig(clip=clip, beta_var=0.0))
    assert apply_weights(batch[2], result.weights).sign().equal(batch[2].sign())


def test_smallest_ratio_keeps_its_sign_next_to_alpha_one():
    """exp(-20) at alpha just below 1: 1 + alpha * (wbar - 1) is 0 in float32, the weight must not be."""
    train = torch.full((1, 20000), -20.0)
    train[0, 0] = -19.99
    result = ais_weights(train, torch.zeros_like(train), torch.ones_like(train), torch.ones_like(train))
    assert 1 - F32_ULP / 2 < result.alpha < 1
    assert result.weights.min() > 0


@pytest.mark.parametrize(("level", "reduce"), [("sequence", torch.sum), ("geometric", torch.mean)])
def test_row_levels(level, reduce):
    """One ratio a row, from the sum or mean over its valid tokens; dbar stays the token mean."""
    train, rollout, advantages, mask = make_batch(9, rows=6, spread=0.3)
    train[0] += 9.0  # far beyond the clamp in sum, within it in mean
    config = AISConfig(level=level, beta_var=0.0, clip=1e12)
    result = ais_weights(train, rollout, advantages, mask, config)
    keep = mask != 0
    log_ratios = torch.stack([reduce((train - rollout)[row][keep[row]].double()) for row in range(6)])
    wbar = log_ratios.clamp(-20, 20).exp()[:, None].expand(keep.shape)
    expected = torch.where(keep, 1 + result.alpha * (wbar - 1), 1.0)
    # wbar is rounded to float32 before the mixing and w after it; the std is over those same float32 wbar.
    assert torch.allclose(result.weights.double(), expected, rtol=2 * F32_ULP, atol=0.0)
    cv = (wbar[keep].std() / wbar[keep].mean()).item()
    assert result.diagnostics["ais/cv"] == pytest.approx(cv, rel=4 * F32_ULP)
    assert 0 < result.alpha < 1
    token = ais_weights(train, rollout, advantages, mask)
    assert result.diagnostics["ais/mean_abs_logp_diff"] == token.diagnostics["ais/mean_abs_logp_diff"]


@pytest.mark.parametrize("n", [1, 99, 100, 5000])
@pytest.mark.parametrize(("scale", "capped"), [(0.02, None), (1e-8, 0.0), (1e4, 64.0)])
def test_quantiles(n, scale, capped):
    """p99, p999 are nearest-rank order statistics to half a bin, 2^-11; below 2^-18 nats they read 0, above 64, 64."""
    diff = torch.randn(1, n, generator=torch.Generator().manual_seed(n)).exp() * scale
    found = ais_weights(diff, torch.zeros(1, n), torch.ones(1, n), torch.ones(1, n)).diagnostics
    for key, permille in (("p99", 990), ("p999", 999)):
        expected = diff[0].sort().values[-(-n * permille // 1000) - 1].item() if capped is None else capped
        assert found[f"ais/abs_logp_diff_{key}"] == pytest.approx(expected, rel=2.0**-11)


def test_active_says_whether_advantages_change_in_their_dtype():
    """A weight of 1 + 1e-6 moves a float32 advantage but is lost in bfloat16."""
    train, advantages = torch.tensor([[1e-4, -1e-4, 0.0]]), torch.tensor([[1.0, -1.0, math.nan]])
    for a, active in ((advantages, 1.0), (advantages.bfloat16(), 0.0)):
        result = ais_weights(train, torch.zeros_like(train), a, torch.tensor([[1, 1, 0]]))  # NaN != NaN is no change
        assert result.alpha > 0
        assert result.diagnostics["ais/active"] == active
        assert apply_weights(a, result.weights)[0, :2].equal(a[0, :2]) == (not active)


def test_half_precision_is_widened_before_the_subtraction():
    """float16 log-probs whose difference float16 cannot hold give the exact difference."""
    train, rollout = torch.tensor([[-0.1, -0.1]]).half(), torch.tensor([[-8.0, -8.0]]).half()
    found = ais_weights(train, rollout, torch.ones(1, 2), torch.ones(1, 2)).diagnostics
    exact = train.double()[0, 0].item() + 8
    assert (train - rollout)[0, 0].item() != exact
    assert found["ais/mean_abs_logp_diff"] == exact


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16])
def test_mask_dtypes_and_strides(dtype):
    """Every mask dtype, and inputs that are transposed views, give the same result."""
    batch = make_batch(10)
    expected = ais_weights(*batch)
    result = ais_weights(*(x.T.contiguous().T for x in (*batch[:3], batch[3].to(dtype))))
    assert result.diagnostics == expected.diagnostics
    assert result.weights.equal(expected.weights)


def test_detached_and_inputs_untouched():
    """No gradient flows through the weights, and no input is written to."""
    batch = make_batch(11)
    batch[0][0, 0] = math.nan  # the slow path too
    copies = [x.clone() for x in batch]
    leaves = [x.requires_grad_() for x in batch[:3]]
    result = ais_weights(*leaves, batch[3], AISConfig(max_nonfinite_fraction=0.1))
    assert not (result.weights.requires_grad or apply_weights(batch[2], result.weights).requires_grad)
    assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(batch, copies, strict=True))


def test_bad_tensors_raise():
    """Shapes, dtypes and masks that cannot be meant are refused with what was found."""
    good = make_batch(12)
    for index, name in enumerate(("train_log_probs", "rollout_log_probs", "advantages", "mask")):
        with pytest.raises(DataError, match=rf"{name} \(4, 23\)"):
            ais_weights(*good[:index], good[index][:, :-1], *good[index + 1 :])
        if name != "mask":
            with pytest.raises(DataError, match=name):
                ais_weights(*good[:index], good[index].long(), *good[index + 1 :])
    with pytest.raises(DataError, match="shape"):
        ais_weights(*(x[0] for x in good))
    for stray in (2.0, 0.5, -1.0, math.nan):
        mask = good[3].float()
        mask[1, 1] = stray
        with pytest.raises(DataError, match=f"found: {stray}"):
            ais_weights(*good[:3], mask)
    with pytest.raises(DataError, match="one shape"):
        apply_weights(good[2], torch.ones(1, 24))
    with pytest.raises(DataError, match="variance"):
        ais_weights(*good[:2], good[2].double() * 1e200, good[3])


@pytest.mark.parametrize("key", ["clip", "delta", "gamma", "beta_var", "eps", "max_nonfinite_fraction", "level"])
def test_config_refuses(key):
    """Wrong types and ranges raise and name the key as it is written on the command line."""
    out_of_range = {"beta_var": [], "eps": [], "max_nonfinite_fraction": [1.5]}.get(key, [0.0])
    for value in [True, "5", None, math.nan, math.inf, -1.0, *out_of_range]:
        with pytest.raises(ConfigError, match=rf"is_correction\.{key} "):
            AISConfig(**{key: value})


def test_config_accepts_its_bounds():
    """Zero switches a term off, and whole numbers are numbers."""
    assert AISConfig(clip=2, beta_var=0, eps=0, max_nonfinite_fraction=1).clip == 2


@pytest.mark.parametrize("clip_ratio_c", [1.5, 1e6], ids=["dual_clip", "no_dual_clip"])
def test_verls_loss_on_reweighted_advantages_is_verls_weighted_loss(clip_ratio_c):
    """w > 0 commutes with PPO's clipping: verl's loss and gradient on w * A equal those with rollout_is_weights = w."""
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    clipping = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": clip_ratio_c}
    actor_config = pytest.importorskip("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **clipping
    )
    train, rollout, advantages, mask = make_batch(13, rows=16, length=50, spread=0.5)
    weights = ais_weights(train, rollout, advantages, mask).weights
    advantages, train = advantages.double(), train.double()
    outcomes = []
    policy_loss = functools.partial(core_algos.compute_policy_loss_vanilla, config=actor_config)
    for a, w in ((apply_weights(advantages, weights), None), (advantages, weights.double()), (advantages, None)):
        current = (train + 0.5 * torch.randn(train.shape, generator=torch.Generator().manual_seed(0))).requires_grad_()
        loss, metrics = policy_loss(train, current, a, mask, rollout_is_weights=w)
        loss.backward()
        outcomes.append((loss, current.grad, metrics))
    (loss, grad, metrics), (verl_loss, verl_grad, verl_metrics), (plain_loss, _, _) = outcomes
    # Float64 throughout; the two orders of multiplication differ by 2^-52 a term, a mean of 800 of size 1 by less.
    assert torch.allclose(loss, verl_loss, rtol=0.0, atol=1e-13)
    assert torch.allclose(grad, verl_grad, rtol=1e-14, atol=1e-17)
    assert metrics == verl_metrics
    assert (loss - plain_loss).abs() > 1e-3
    assert metrics["actor/pg_clipfrac"] > 0.1
    assert (metrics["actor/pg_clipfrac_lower"] > 0.05) == (clip_ratio_c == 1.5)
