"""Adaptive Importance Sampling (AIS): how far to trust the trainer/rollout ratio, one scalar a batch.

A quantised rollout samples tokens from a policy that differs a little from the one that trains. The ratio of the two
corrects for it but adds variance. AIS (arXiv 2605.13907) measures, on the batch itself, whether the weights can be
trusted (`a_ess`), whether a correction is needed at all (`a_mis`) and whether it inflates the gradient (`a_var`), and
mixes the truncated ratio with 1 accordingly. Per valid token t, in the paper's symbols:

    rho_t  = exp(clamp(logp_train_t - logp_rollout_t, -20, 20))     SAME checkpoint; not PPO's old/new ratio
    wbar_t = min(rho_t, C)
    a_ess  = (1 + CV^2) ** -0.5                 CV = std(wbar) / mean(wbar)
    a_mis  = min(1, dbar / delta)               dbar = mean |logp_train - logp_rollout|
    a_var  = max(0, (Dsig - gamma) / gamma)     Dsig = std(A * wbar) / (std(A) + eps)
    alpha  = clip(a_ess - beta_var * a_var, 0, 1) * a_mis
    w_t    = 1 + alpha * (wbar_t - 1)           A'_t = w_t * A_t

Where the paper is silent: std is the sample one (ddof = 1, the only one that gives the paper's worked example); sums
run in float64; constant advantages give Dsig = 1 (0 / eps would turn a harmless batch off); a batch with fewer than
two usable tokens has no std and gets alpha = 0. Pure torch: knows neither verl nor vLLM.
"""

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from verl_fp8.correction.statistics import Moments, Quantiles
from verl_fp8.errors import ConfigError, DataError

LEVELS = ("token", "sequence", "geometric")

# exp(+-20): the range verl's rollout_corr_helper.SAFETY_BOUND gives the ratio before truncation.
_LOG_RATIO_BOUND = 20.0

# Elements a block. Scratch takes 36 bytes each, less than one input tensor of a real batch; smaller blocks lose more to
# call overhead than they win in the L2 cache.
_BLOCK = 1 << 17

# Of the numeric keys: lowest value, whether it is itself allowed, highest value.
_RANGES = {
    # A truncation below exp(-20) would lie under every ratio.
    "clip": (math.exp(-_LOG_RATIO_BOUND), True, math.inf),
    "delta": (0.0, False, math.inf),
    "gamma": (0.0, False, math.inf),
    "beta_var": (0.0, True, math.inf),
    "eps": (0.0, True, math.inf),
    "max_nonfinite_fraction": (0.0, True, 1.0),
    # At 1 alpha would never leave its first value.
    "ema": (0.0, True, 0.999),
}


@dataclass(frozen=True, kw_only=True)
class AISConfig:
    """The constants of AIS, as `is_correction.<key>` sets them; defaults from arXiv 2605.13907.

    Args:
        clip: C, the upper truncation of the ratio.
        delta: mean |log-prob difference| (nats a token) from which the correction counts as fully needed.
        gamma: ratio of standard deviations from which the correction counts as inflating the gradient.
        beta_var: strength of that penalty; 0 switches it off.
        eps: added to std(A), in units of A.
        level: what one ratio covers. "token": each token its own. "sequence": exp of the sum of the log-ratios over the
            row's valid tokens (clamped to +-20), the same for all its tokens. "geometric": exp of their mean.
            dbar is the mean over tokens at every level, and all other statistics run over tokens too.
        max_nonfinite_fraction: highest tolerated share of valid tokens whose log-ratio is NaN or infinite.
        ema: weight of the previous batch's alpha in an exponential moving average; 0 takes each batch's own.

    Raises:
        ConfigError: a value of the wrong type or out of range; the message names the key.
    """

    clip: float = 5.0
    delta: float = 0.02
    gamma: float = 1.2
    beta_var: float = 1.0
    eps: float = 1e-6
    level: str = "token"
    max_nonfinite_fraction: float = 0.01
    ema: float = 0.0

    def __post_init__(self) -> None:
        for name, (low, low_allowed, high) in _RANGES.items():
            value = getattr(self, name)
            # bool is a Real in Python; `clip: true` in a YAML must not become C = 1.
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if is_number and math.isfinite(value) and (low < value <= high or (low_allowed and value == low)):
                continue
            raise ConfigError(
                f"is_correction.{name} as a finite number {'>=' if low_allowed else '>'} {low:.3g} and <= {high}",
                f"{value!r} of type {type(value).__name__}",
                f"set is_correction.{name}; the default is {type(self).__dataclass_fields__[name].default}",
            )
        if not isinstance(self.level, str) or self.level not in LEVELS:
            raise ConfigError(f"is_correction.level in {LEVELS}", repr(self.level), "set is_correction.level=token")


@dataclass(frozen=True, eq=False)  # eq: comparing tensors inside a tuple raises
class AISResult:
    """What `ais_weights` returns."""

    weights: Tensor  # w, float32, shape (batch, response_len), detached; exactly 1 where no correction applies
    alpha: float  # the mixing factor in [0, 1]
    diagnostics: dict[str, float]  # the `ais/*` metrics, see `ais_weights`


@torch.no_grad()
def ais_weights(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: AISConfig | None = None,
    previous_alpha: float | None = None,
) -> AISResult:
    """Compute the AIS weights of a batch (arXiv 2605.13907; the formulas stand at the top of this module).

    All statistics are over the rows given, so the scope of alpha is the caller's: the whole train batch, or any subset
    of its rows. No input is modified. What lies where the mask is 0, NaN included, has no influence.

    Args:
        train_log_probs: log-probs (nats) of the sampled tokens under the trainer, shape (batch, response_len), any
            floating dtype. The difference is taken in float32, or in float64 if either side is.
        rollout_log_probs: the same under the rollout engine, same checkpoint, same shape.
        advantages: A, same shape, any floating dtype.
        mask: 1 at valid tokens, 0 elsewhere; same shape; bool, integer or floating.
        config: the constants; None takes the paper's.
        previous_alpha: alpha of the batch before, for `config.ema`; None for the first one.

    Returns:
        AISResult. A valid token whose log-ratio is not finite gets weight 1, is left out of the statistics and is
        counted. Diagnostics, over the n tokens that remain (neutral where there is none: a weight 1, a difference 0):
        `ais/alpha`, `ais/alpha_ess`, `ais/alpha_mis`, `ais/alpha_var`: alpha, a_ess, a_mis, a_var;
        `ais/mean_abs_logp_diff` (dbar), `ais/abs_logp_diff_p99`, `_p999`: nats; the quantiles by nearest rank, to
        0.05 % between 4e-6 and 64 (0 below, 64 above); `ais/cv`; `ais/ess_ratio`: Kish's (sum wbar)^2 / (n sum wbar^2);
        `ais/variance_ratio`: Dsig; `ais/clip_fraction`: share with rho > C; `ais/weight_min`, `_mean`, `_max`: of w;
        `ais/weight_positive_advantage`, `ais/weight_negative_advantage`: mean w where A > 0 and where A < 0;
        `ais/n_tokens`: n; `ais/nonfinite_tokens`; `ais/active`: 1 if some A * w differs from A in A's dtype, else 0.
        With `config.ema` also `ais/alpha_batch`: alpha before averaging.

    Raises:
        DataError: shapes differ or are not 2-D; a dtype is not floating; the mask holds something beside 0 and 1; a
            valid advantage is not finite; too many log-ratios are not (`config.max_nonfinite_fraction`).
    """
    config = AISConfig() if config is None else config
    _check_inputs(train_log_probs, rollout_log_probs, advantages, mask)
    batch, length = mask.shape
    weights = torch.empty(mask.shape, dtype=torch.float32, device=train_log_probs.device)
    step = max(1, _BLOCK // max(1, length))  # whole rows: a sequence ratio needs its row in one piece
    blocks = [slice(start, start + step) for start in range(0, batch, step)]

    stats = Statistics(config, min(step, batch) * length, weights.device)
    for rows in blocks:
        stats.add(train_log_probs[rows], rollout_log_probs[rows], advantages[rows], mask[rows], weights[rows])
    diagnostics = stats.diagnostics(previous_alpha)

    alpha, active = diagnostics["ais/alpha"], False
    one_minus_alpha = torch.tensor(1.0 - alpha, dtype=torch.float64, device=weights.device)
    for rows in blocks:
        # 1 + alpha * (wbar - 1), as a sum of positive terms, so that no rounding can make a weight 0 or negative. In
        # float64, so that the final float32 is exactly 1 for wbar = 1 or alpha = 0, and exactly wbar for alpha = 1.
        block = weights[rows]
        wide = stats.wide[0, : block.numel()].view_as(block).copy_(block)
        block.copy_(torch.add(one_minus_alpha, wide, alpha=alpha, out=wide))
        if alpha > 0.0 and not active:
            changed = apply_weights(advantages[rows], block) != advantages[rows]
            active = bool((changed & (mask[rows] != 0)).any())
    diagnostics["ais/active"] = float(active)
    return AISResult(weights=weights, alpha=alpha, diagnostics=diagnostics)


def alpha_parts(mean_abs_diff: float, cv: float, variance_ratio: float, config: AISConfig) -> dict[str, float]:
    """`alpha_ess`, `alpha_mis`, `alpha_var` and the `alpha` they make, of dbar (nats), CV and Dsig."""
    ess = (1.0 + cv * cv) ** -0.5
    mis = min(1.0, mean_abs_diff / config.delta)
    var = max(0.0, (variance_ratio - config.gamma) / config.gamma)
    alpha = min(1.0, max(0.0, ess - config.beta_var * var)) * mis
    return {"alpha": alpha, "alpha_ess": ess, "alpha_mis": mis, "alpha_var": var}


@torch.no_grad()
def apply_weights(advantages: Tensor, weights: Tensor) -> Tensor:
    """Return A' = w * A as a new, detached tensor in the dtype of `advantages`.

    Args:
        advantages: A, any shape, any floating dtype; the product is taken in float32, or float64 if A is.
        weights: w, same shape, float32.

    Raises:
        DataError: the shapes differ (broadcasting would hide a mix-up of rows).
    """
    if advantages.shape != weights.shape:
        shapes = f"advantages {tuple(advantages.shape)}, weights {tuple(weights.shape)}"
        raise DataError("advantages and weights of one shape", shapes, "pass the weights of these very rows")
    return (_wide(advantages) * weights).to(advantages.dtype)


class Statistics:
    """The first walk over the batch: what alpha and the diagnostics need, over the tokens kept.

    The scratch is allocated once: fresh temporaries cost more in page faults than the arithmetic does. Masked values
    are multiplied by 0 rather than selected: several times faster, and safe unless one is NaN or infinite, which a sum
    that is needed anyway tells.
    """

    def __init__(self, config: AISConfig, size: int, device: torch.device) -> None:
        self.config = config
        self.narrow = torch.empty(3, size, dtype=torch.float32, device=device)
        self.wide = torch.empty(3, size, dtype=torch.float64, device=device)
        self.quantiles = Quantiles(device)
        self.valid = self.nonfinite = self.clipped = 0
        self.sum_abs_diff = 0.0
        self.wbar_min, self.wbar_max = math.inf, -math.inf
        self.excess, self.advantage, self.weighted = Moments(), Moments(), Moments()  # of wbar - 1, A, A * wbar
        self.signs = [0.0] * 4  # sums of sign(A), sign(A)^2, sign(A) (wbar - 1) and sign(A)^2 (wbar - 1)

    def add(self, train: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, wbar: Tensor) -> None:
        """Add a block of rows and write its wbar, 1 where no token is kept, into `wbar`."""
        shape = mask.shape
        train, rollout, advantages, mask, wbar = (x.reshape(-1) for x in (train, rollout, advantages, mask, wbar))
        diff, spare, keep = self.narrow[:, : mask.numel()]
        advantage, excess, product = self.wide[:, : mask.numel()]

        n_valid = n = _copy_mask(mask, keep, product)
        self.valid += n_valid
        torch.sub(_wide(train), _wide(rollout), out=diff).mul_(keep)
        sum_abs_diff = torch.abs(diff, out=spare).sum(dtype=torch.float64).item()
        if not math.isfinite(sum_abs_diff):
            n = int(keep.mul_(torch.isfinite(diff)).sum().item())
            self.nonfinite += n_valid - n
            diff.masked_fill_(keep == 0, 0.0)
            sum_abs_diff = torch.abs(diff, out=spare).sum(dtype=torch.float64).item()
        self.quantiles.add(spare)
        narrow = torch.mul(advantages, keep, out=spare) if advantages.dtype == torch.float32 else advantages * keep
        sum_advantage = advantage.copy_(narrow).sum().item()
        if not math.isfinite(sum_advantage):
            _check_advantages(advantages, mask)
            sum_advantage = advantage.copy_(advantages).masked_fill_(keep == 0, 0.0).sum().item()
        if n == 0:
            wbar.fill_(1.0)
            return

        self.sum_abs_diff += sum_abs_diff
        self._truncated_ratio(diff.view(shape), keep.view(shape), wbar.view(shape))
        torch.sub(product.copy_(wbar), 1.0, out=excess)
        product.mul_(advantage)
        sum_excess = excess.sum().item()
        self.excess.add(excess, keep, n, sum_excess)
        self.advantage.add(advantage, keep, n, sum_advantage)
        self.weighted.add(product, keep, n, product.sum().item())

        sign = torch.sign(advantage, out=advantage)
        count = torch.dot(sign, sign).item()
        if count < n:
            sum_excess = torch.dot(torch.mul(sign, sign, out=product), excess).item()
        sums = (sign.sum().item(), count, torch.dot(sign, excess).item(), sum_excess)
        self.signs = [old + new for old, new in zip(self.signs, sums, strict=True)]

    def _truncated_ratio(self, diff: Tensor, keep: Tensor, wbar: Tensor) -> None:
        """Write wbar of a block, 1 where `keep` is 0, into `wbar`; note its extremes and truncations."""
        config = self.config
        if config.level == "token":
            torch.exp(diff.clamp_(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND), out=wbar)
        else:
            log_ratio = diff.sum(dim=1, keepdim=True, dtype=torch.float64)
            if config.level == "geometric":
                log_ratio /= keep.sum(dim=1, keepdim=True).clamp_(min=1.0)
            wbar.copy_(log_ratio.clamp_(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp_())
            wbar.masked_fill_(keep == 0, 1.0)
        low, high = (bound.item() for bound in wbar.aminmax())
        if high > config.clip:
            over = wbar > config.clip
            wbar.clamp_(max=config.clip)
            if config.clip < 1.0:  # else the tokens that are not kept stay at 1
                over &= keep != 0
                wbar.masked_fill_(keep == 0, 1.0)
            self.clipped += int(torch.count_nonzero(over))
            low, high = (bound.item() for bound in wbar.aminmax())
        if low == 1.0 or high == 1.0:
            # This 1 may come from tokens that are not kept.
            low, high = (bound.item() for bound in wbar[keep != 0].aminmax())
        self.wbar_min, self.wbar_max = min(self.wbar_min, low), max(self.wbar_max, high)

    def diagnostics(self, previous_alpha: float | None) -> dict[str, float]:
        """alpha and every metric but `ais/active`."""
        config, n = self.config, self.excess.n
        if self.nonfinite > config.max_nonfinite_fraction * self.valid:
            raise DataError(
                f"finite log-prob differences at all but {config.max_nonfinite_fraction:.2%} of the valid tokens",
                f"{self.nonfinite} NaN or infinite among {self.valid}",
                "find the side that overflows; is_correction.max_nonfinite_fraction sets the tolerated share",
            )
        dbar = self.sum_abs_diff / n if n else 0.0
        mean_wbar = 1.0 + self.excess.mean
        cv = self.excess.std / mean_wbar
        std, mean = self.advantage.std, self.advantage.mean
        # Constant A: float64 leaves a std of some 1e-16 of the mean, one deviating float32 among 10^7 leaves 1e-11.
        variance_ratio = 1.0 if std <= 1e-12 * abs(mean) else self.weighted.std / (std + config.eps)
        if not math.isfinite(variance_ratio):
            raise DataError("advantages whose variance float64 can hold", f"std(A) = {std}", "scale the rewards down")
        parts = {f"ais/{name}": value for name, value in alpha_parts(dbar, cv, variance_ratio, config).items()}
        parts["ais/alpha"] = alpha = parts["ais/alpha"] if n > 1 else 0.0
        if config.ema:
            parts["ais/alpha_batch"] = alpha
            if previous_alpha is not None and n > 1:
                parts["ais/alpha"] = alpha = config.ema * previous_alpha + (1.0 - config.ema) * alpha

        balance, count, excess_balance, excess = self.signs
        return {
            **parts,
            "ais/mean_abs_logp_diff": dbar,
            "ais/cv": cv,
            "ais/ess_ratio": mean_wbar**2 / (mean_wbar**2 + self.excess.m2 / n) if n else 1.0,
            "ais/variance_ratio": variance_ratio,
            "ais/clip_fraction": self.clipped / n if n else 0.0,
            "ais/weight_min": 1.0 + alpha * (self.wbar_min - 1.0) if n else 1.0,
            "ais/weight_mean": 1.0 + alpha * self.excess.mean,
            "ais/weight_max": 1.0 + alpha * (self.wbar_max - 1.0) if n else 1.0,
            "ais/abs_logp_diff_p99": self.quantiles.from_top(n // 100),
            "ais/abs_logp_diff_p999": self.quantiles.from_top(n // 1000),
            "ais/weight_positive_advantage": 1.0 + alpha * (excess + excess_balance) / max(1.0, count + balance),
            "ais/weight_negative_advantage": 1.0 + alpha * (excess - excess_balance) / max(1.0, count - balance),
            "ais/n_tokens": float(n),
            "ais/nonfinite_tokens": float(self.nonfinite),
        }


def _check_inputs(train: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor) -> None:
    floating = {"train_log_probs": train, "rollout_log_probs": rollout, "advantages": advantages}
    if mask.dim() != 2 or any(tensor.shape != mask.shape for tensor in floating.values()):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in (floating | {"mask": mask}).items())
        raise DataError("four tensors of one shape (batch, response_len)", shapes, "pad the same rows alike")
    for name, tensor in floating.items():
        if not tensor.is_floating_point():
            raise DataError(f"{name} of a floating dtype", str(tensor.dtype), f"convert {name} to float32")


def _copy_mask(mask: Tensor, keep: Tensor, spare: Tensor) -> int:
    """Copy the mask into the float32 `keep`, check that it holds only 0 and 1, and return how many 1.

    A block has less than 2^24 elements, so that the sum is exact. `spare` is float64 scratch.
    """
    if mask.dtype == torch.bool:  # through bytes: torch converts booleans one by one, ten times as slowly
        return int(keep.copy_(mask.view(torch.uint8)).sum().item())
    total = spare.copy_(mask).sum().item()
    # sum(m) = sum(m^2) implies 0 and 1 for integers, and for floats but for contrived cancellation.
    if total != torch.dot(spare, spare).item():
        stray = spare[(spare != 0) & (spare != 1)][0].item()
        raise DataError("a mask of 0 and 1", f"{stray} in it", "pass the response mask, not loss weights")
    keep.copy_(spare)
    return int(total)


def _check_advantages(advantages: Tensor, mask: Tensor) -> None:
    bad = int(torch.count_nonzero((mask != 0) & ~torch.isfinite(advantages)))
    if bad:
        found = f"{bad} NaN or infinite ones among the {int(torch.count_nonzero(mask))} of one block of rows"
        raise DataError("finite advantages at the valid tokens", found, "look at the rewards and the estimator")


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
