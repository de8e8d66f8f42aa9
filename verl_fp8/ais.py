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

Choices where the paper is silent: std is the sample one (ddof = 1, the only one that gives the paper's worked example);
sums run in float64; constant advantages give Dsig = 1 (0 / eps would turn a harmless batch off); a batch with fewer than
two usable tokens has no std and gets alpha = 0.

The batch is walked twice in blocks of rows (once for the statistics, once for the weights), so beyond the returned
weights only a few megabytes are needed. Pure torch: knows neither verl nor vLLM.
"""

import math
from dataclasses import dataclass, field
from numbers import Real

import torch

from verl_fp8.errors import ConfigError, DataError

LEVELS = ("token", "sequence", "geometric")

# exp(+-20): the range verl's rollout_corr_helper.SAFETY_BOUND gives the ratio before truncation.
_LOG_RATIO_BOUND = 20.0

# Elements a block. Small enough that its scratch stays near the L2 cache and far below one input tensor, large enough
# that torch still splits each operation over the threads (its grain is 2**15) and call overhead stays small.
_BLOCK = 1 << 16

# Bounds of the numeric keys: (lowest, whether the lowest itself is allowed, highest).
_RANGES = {
    # Below exp(-20) the truncation would lie under every ratio and make all of them the same constant.
    "clip": (math.exp(-_LOG_RATIO_BOUND), True, math.inf),
    "delta": (0.0, False, math.inf),
    "gamma": (0.0, False, math.inf),
    "beta_var": (0.0, True, math.inf),
    "eps": (0.0, True, math.inf),
    "max_nonfinite_fraction": (0.0, True, 1.0),
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
        max_nonfinite_fraction: highest tolerated share of valid tokens whose log-probs are NaN or infinite.

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

    def __post_init__(self) -> None:
        for name, (low, low_allowed, high) in _RANGES.items():
            value = getattr(self, name)
            # bool is a Real in Python; `clip: true` in a YAML must not become C = 1.
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if is_number and math.isfinite(value) and (low < value <= high or (low_allowed and value == low)):
                continue
            interval = f"{'[' if low_allowed else '('}{low:.3g}, {'inf)' if high == math.inf else f'{high:.3g}]'}"
            raise ConfigError(
                f"is_correction.{name} as a finite number in {interval}",
                f"{value!r} of type {type(value).__name__}",
                f"set is_correction.{name}, the default is {type(self).__dataclass_fields__[name].default}",
            )
        if not isinstance(self.level, str) or self.level not in LEVELS:
            raise ConfigError(
                f"is_correction.level as one of {', '.join(LEVELS)}",
                repr(self.level),
                "set is_correction.level=token, the default",
            )


@dataclass(frozen=True, eq=False)  # eq: comparing tensors inside a tuple raises
class AISResult:
    """What `ais_weights` returns.

    Attributes:
        weights: w, float32, shape (batch, response_len), detached; exactly 1 where no correction applies.
        alpha: the mixing factor in [0, 1].
        diagnostics: the `ais/*` metrics, see `ais_weights`.
    """

    weights: torch.Tensor
    alpha: float
    diagnostics: dict[str, float]


@dataclass
class _Moments:
    """Mean and sum of squared deviations of a stream, merged block by block (Chan, Golub and LeVeque 1983).

    Never subtracts two large sums, so the result does not depend on how the rows are ordered or cut into blocks beyond
    float64 rounding, whatever the mean.
    """

    n: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def add(self, values: torch.Tensor, keep: torch.Tensor, n: int, scratch: torch.Tensor) -> None:
        """Add the `n` > 0 values where `keep` is 1; all float64 and flat, `values` zero where `keep` is."""
        mean = values.sum().item() / n
        torch.sub(values, keep, alpha=mean, out=scratch)
        delta = mean - self.mean
        self.m2 += torch.dot(scratch, scratch).item() + delta * delta * (self.n * n / (self.n + n))
        self.n += n
        self.mean += delta * (n / self.n)

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 where it is undefined."""
        return math.sqrt(self.m2 / (self.n - 1)) if self.n > 1 else 0.0


@dataclass
class _Largest:
    """The `k` largest values of a stream of non-negative values, exactly, holding a few times `k` values.

    An upper quantile of the whole batch without a copy of the batch: a value below the k-th largest seen so far can
    never come back.
    """

    k: int
    floor: float = -1.0
    pool: list[torch.Tensor] = field(default_factory=list)

    def add(self, values: torch.Tensor) -> None:
        self.pool.append(values[values > self.floor])
        if sum(part.numel() for part in self.pool) > 3 * self.k + _BLOCK:
            self.pool = [self.descending()]
            self.floor = self.pool[0][-1].item()

    def descending(self) -> torch.Tensor:
        pool = torch.cat(self.pool)
        return pool.topk(min(self.k, pool.numel())).values


class _Statistics:
    """The first walk over the batch: what alpha and the diagnostics need. Counts and sums run over the kept tokens.

    Its scratch is allocated once, because fresh temporaries for each operation cost more in page faults than the
    arithmetic does. Masked values are multiplied by 0 rather than selected, which is several times faster; that is safe
    as long as nothing under the mask is NaN or infinite, and a sum that is needed anyway tells.
    """

    def __init__(self, like: torch.Tensor, size: int, config: AISConfig) -> None:
        self.config = config
        self.narrow = torch.empty(3, size, dtype=torch.float32, device=like.device)
        self.wide = torch.empty(5, size, dtype=torch.float64, device=like.device)
        # n // 100 values lie strictly above the 99th percentile's rank, hence the + 1.
        self.largest = _Largest(like.numel() // 100 + 1)
        self.valid = self.nonfinite = self.clipped = 0
        self.sum_abs_diff = 0.0
        self.wbar_min, self.wbar_max = math.inf, -math.inf
        self.excess, self.advantage, self.weighted = _Moments(), _Moments(), _Moments()  # of wbar - 1, A, A * wbar
        self.first_advantage: float | None = None
        self.constant_advantage = True
        # Over the kept tokens: sums of sign(A), sign(A)^2, sign(A) (wbar - 1) and sign(A)^2 (wbar - 1).
        self.signs = [0.0, 0.0, 0.0, 0.0]

    def add(
        self,
        train: torch.Tensor,
        rollout: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        wbar: torch.Tensor,
    ) -> None:
        """Add a block of rows and write its wbar, 1 where no token is kept, into `wbar`."""
        shape = mask.shape
        train, rollout, advantages, mask, wbar = (x.reshape(-1) for x in (train, rollout, advantages, mask, wbar))
        diff, abs_diff, keep32 = self.narrow[:, : mask.numel()]
        keep, advantage, excess, product, scratch = self.wide[:, : mask.numel()]

        n = self._copy_mask(mask, keep)
        self.valid += n
        self._copy_advantages(advantages, mask, keep, advantage)
        if train.dtype == rollout.dtype == torch.float32:
            torch.sub(train, rollout, out=diff)
        else:
            diff.copy_(_wide(train) - _wide(rollout))
        keep32.copy_(keep)
        sum_abs_diff = torch.abs(torch.mul(diff, keep32, out=abs_diff), out=abs_diff).sum(dtype=torch.float64).item()
        if math.isfinite(sum_abs_diff):
            diff.mul_(keep32)
        else:
            keep32.mul_(torch.isfinite(diff))
            keep.copy_(keep32)
            advantage.mul_(keep)
            diff.masked_fill_(keep == 0, 0.0)
            sum_abs_diff = torch.abs(diff, out=abs_diff).sum(dtype=torch.float64).item()
            n_valid, n = n, int(keep.sum().item())
            self.nonfinite += n_valid - n
        if n == 0:
            wbar.fill_(1.0)
            return
        self.sum_abs_diff += sum_abs_diff
        self.largest.add(abs_diff)

        self._truncated_ratio(diff.view(shape), keep.view(shape), wbar.view(shape))
        excess.copy_(wbar).sub_(1.0)
        torch.addcmul(advantage, advantage, excess, out=product)
        self.excess.add(excess, keep, n, scratch)
        self.weighted.add(product, keep, n, scratch)
        self.advantage.add(advantage, keep, n, scratch)
        if self.constant_advantage:
            if self.first_advantage is None:
                self.first_advantage = advantage[keep.argmax()].item()
            self.constant_advantage = not bool(((advantage != self.first_advantage) & (keep != 0)).any())
        sign, square = torch.sign(advantage, out=scratch), torch.mul(scratch, scratch, out=product)
        for i, (left, right) in enumerate(((sign, keep), (square, keep), (sign, excess), (square, excess))):
            self.signs[i] += torch.dot(left, right).item()

    def _truncated_ratio(self, diff: torch.Tensor, keep: torch.Tensor, wbar: torch.Tensor) -> None:
        """Write wbar of one block into `wbar`, 1 where `keep` is 0, and note its extremes and truncations."""
        config = self.config
        if config.level == "token":
            # out= rather than exp_, which is three times slower on CPU (it bypasses MKL's vector maths).
            torch.exp(diff.clamp_(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND), out=wbar)
        else:
            log_ratio = diff.sum(dim=1, keepdim=True, dtype=torch.float64)
            if config.level == "geometric":
                log_ratio /= keep.sum(dim=1, keepdim=True).clamp_(min=1.0)
            wbar.copy_(log_ratio.clamp_(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp_())
            wbar.masked_fill_(keep == 0, 1.0)
        low, high = (bound.item() for bound in wbar.aminmax())
        if high > config.clip:
            self.clipped += int(torch.count_nonzero((wbar > config.clip) & (keep != 0)))
            wbar.clamp_(max=config.clip)
            if config.clip < 1.0:
                wbar.masked_fill_(keep == 0, 1.0)
            low, high = (bound.item() for bound in wbar.aminmax())
        if low == 1.0 or high == 1.0:
            # That 1 may come from tokens that are not kept; otherwise they cannot be an extreme.
            low, high = (bound.item() for bound in wbar[keep != 0].aminmax())
        self.wbar_min, self.wbar_max = min(self.wbar_min, low), max(self.wbar_max, high)

    @staticmethod
    def _copy_mask(mask: torch.Tensor, keep: torch.Tensor) -> int:
        """Copy the mask into `keep`, make sure that it holds nothing but 0 and 1, and return the number of ones."""
        keep.copy_(mask)
        total = keep.sum().item()
        # sum(m) = sum(m^2) holds for integers only if all are 0 or 1, for floats but for contrived cancellations.
        if total != torch.dot(keep, keep).item():
            stray = keep[(keep != 0) & (keep != 1)][0].item()
            raise DataError("a mask of 0 and 1", f"{stray} in it", "pass the response mask, not loss weights")
        return int(total)

    @staticmethod
    def _copy_advantages(advantages: torch.Tensor, mask: torch.Tensor, keep: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the advantages into `out`, 0 where the mask is; raise if one that counts is not finite."""
        out.copy_(advantages).mul_(keep)
        if math.isfinite(out.sum().item()):
            return
        out.copy_(advantages).masked_fill_(mask == 0, 0.0)
        bad = int(torch.count_nonzero(~torch.isfinite(out)))
        if bad:
            raise DataError(
                "finite advantages at the valid tokens",
                f"{bad} NaN or infinite ones in a block of {int(keep.sum().item())} valid tokens",
                "look at the rewards and at the advantage estimator: AIS only rescales what they give",
            )

    def sign_mean_excess(self, direction: int) -> float:
        """Mean of wbar - 1 where sign(A) is `direction` (1 or -1); 0 if there is no such token."""
        balance, count, excess_balance, excess = self.signs
        return (excess + direction * excess_balance) / max(1.0, count + direction * balance)


@torch.no_grad()
def ais_weights(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: AISConfig | None = None,
) -> AISResult:
    """Compute the AIS weights of a batch (arXiv 2605.13907; the formulas stand at the top of this module).

    All statistics are over the rows given, so the scope of alpha is the caller's: the whole train batch, or any subset
    of its rows. No input is modified. What lies where the mask is 0, NaN included, has no influence.

    Args:
        train_log_probs: log-probs (nats) of the sampled tokens under the trainer, shape (batch, response_len), any
            floating dtype. The difference is taken in float32, or float64 if either side is.
        rollout_log_probs: the same under the rollout engine, same checkpoint, same shape.
        advantages: A, same shape, any floating dtype.
        mask: 1 at valid tokens, 0 elsewhere; same shape; bool, integer or floating.
        config: the constants; None takes the paper's.

    Returns:
        AISResult. A valid token whose log-ratio is not finite gets weight 1, is left out of the statistics and is
        counted. Diagnostics, over the n tokens that remain (weights are w, neutral values where there is no token):
        `ais/alpha`, `ais/alpha_ess`, `ais/alpha_mis`, `ais/alpha_var`: alpha, a_ess, a_mis, a_var;
        `ais/mean_abs_logp_diff` (dbar), `ais/abs_logp_diff_p99`, `_p999`: nats; quantiles exact, by nearest rank;
        `ais/cv`; `ais/ess_ratio`: Kish's (sum wbar)^2 / (n sum wbar^2); `ais/variance_ratio`: Dsig;
        `ais/clip_fraction`: share with rho > C; `ais/weight_min`, `_mean`, `_max`; `ais/weight_positive_advantage`,
        `ais/weight_negative_advantage`: mean w where A > 0 and where A < 0;
        `ais/n_tokens`: n; `ais/nonfinite_tokens`; `ais/active`: 1 if some A * w differs from A in A's dtype, else 0.

    Raises:
        DataError: shapes differ or are not 2-D; a dtype is not floating; the mask holds something beside 0 and 1; a valid
            advantage is not finite; more than `config.max_nonfinite_fraction` of the valid log-ratios are not finite.
    """
    config = AISConfig() if config is None else config
    _check_inputs(train_log_probs, rollout_log_probs, advantages, mask)
    weights = torch.empty(mask.shape, dtype=torch.float32, device=train_log_probs.device)
    step = max(1, _BLOCK // max(1, mask.shape[1]))  # whole rows: a sequence ratio needs its row in one piece
    blocks = [slice(start, start + step) for start in range(0, mask.shape[0], step)]

    stats = _Statistics(mask, min(step, mask.shape[0]) * mask.shape[1], config)
    for rows in blocks:
        stats.add(train_log_probs[rows], rollout_log_probs[rows], advantages[rows], mask[rows], weights[rows])
    if stats.nonfinite > config.max_nonfinite_fraction * stats.valid:
        raise DataError(
            f"AIS weights with at most {config.max_nonfinite_fraction:.2%} of the log-ratios not finite",
            f"{stats.nonfinite} of {stats.valid} valid tokens with a NaN or infinite log-prob difference",
            "find out which side's log-probs overflow; is_correction.max_nonfinite_fraction sets the tolerated share",
        )

    diagnostics = _mixing(stats, config)
    alpha = diagnostics["ais/alpha"]
    active = False
    for rows in blocks:
        if alpha == 0.0:
            weights[rows] = 1.0
            continue
        if alpha < 1.0:
            # float64, because in float32 1 + alpha * (wbar - 1) can round to 0 for a tiny wbar and lose A's sign.
            wide = stats.wide[0, : weights[rows].numel()].view_as(weights[rows])
            weights[rows] = wide.copy_(weights[rows]).sub_(1.0).mul_(alpha).add_(1.0)
        if not active:
            changed = apply_weights(advantages[rows], weights[rows]) != advantages[rows]
            active = bool((changed & (mask[rows] != 0)).any())
    diagnostics["ais/active"] = float(active)
    return AISResult(weights=weights, alpha=alpha, diagnostics=diagnostics)


@torch.no_grad()
def apply_weights(advantages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return A' = w * A as a new, detached tensor in the dtype of `advantages`.

    Args:
        advantages: A, any shape, any floating dtype; the product is rounded once, from float32 or wider.
        weights: w, same shape, float32.

    Raises:
        DataError: the shapes differ (broadcasting would hide a mix-up of rows).
    """
    if advantages.shape != weights.shape:
        raise DataError(
            "advantages and weights of one shape",
            f"advantages {tuple(advantages.shape)}, weights {tuple(weights.shape)}",
            "pass the weights that ais_weights returned for these very rows",
        )
    return (_wide(advantages) * weights).to(advantages.dtype)


def _check_inputs(train: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> None:
    tensors = {"train_log_probs": train, "rollout_log_probs": rollout, "advantages": advantages, "mask": mask}
    if train.dim() != 2 or any(tensor.shape != train.shape for tensor in tensors.values()):
        raise DataError(
            "four tensors of one shape (batch, response_len)",
            ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()),
            "pass response-only tensors of the same rows, padded alike",
        )
    for name, tensor in tensors.items():
        if name != "mask" and not tensor.is_floating_point():
            raise DataError(f"{name} of a floating dtype", str(tensor.dtype), f"convert {name} to float32")


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _mixing(stats: _Statistics, config: AISConfig) -> dict[str, float]:
    """alpha and the diagnostics from the statistics of a batch."""
    n = stats.excess.n
    dbar = stats.sum_abs_diff / n if n else 0.0
    mean_wbar = 1.0 + stats.excess.mean
    cv = stats.excess.std / mean_wbar
    mean_square = stats.excess.m2 / n + mean_wbar**2 if n else 1.0
    variance_ratio = 1.0
    if not stats.constant_advantage:
        variance_ratio = stats.weighted.std / (stats.advantage.std + config.eps)
    if not math.isfinite(variance_ratio):
        raise DataError(
            "advantages whose variance float64 can hold",
            f"std(A) = {stats.advantage.std}, std(A * wbar) = {stats.weighted.std}",
            "scale the rewards down",
        )
    alpha_ess = (1.0 + cv * cv) ** -0.5
    alpha_mis = min(1.0, dbar / config.delta)
    alpha_var = max(0.0, (variance_ratio - config.gamma) / config.gamma)
    alpha = min(1.0, max(0.0, alpha_ess - config.beta_var * alpha_var)) * alpha_mis if n > 1 else 0.0

    largest = stats.largest.descending() if n else torch.zeros(1)
    return {
        "ais/alpha": alpha,
        "ais/alpha_ess": alpha_ess,
        "ais/alpha_mis": alpha_mis,
        "ais/alpha_var": alpha_var,
        "ais/mean_abs_logp_diff": dbar,
        "ais/cv": cv,
        "ais/ess_ratio": mean_wbar**2 / mean_square,
        "ais/variance_ratio": variance_ratio,
        "ais/clip_fraction": stats.clipped / n if n else 0.0,
        "ais/weight_min": 1.0 + alpha * (stats.wbar_min - 1.0) if n else 1.0,
        "ais/weight_mean": 1.0 + alpha * stats.excess.mean,
        "ais/weight_max": 1.0 + alpha * (stats.wbar_max - 1.0) if n else 1.0,
        "ais/abs_logp_diff_p99": largest[n // 100].item(),
        "ais/abs_logp_diff_p999": largest[n // 1000].item(),
        "ais/weight_positive_advantage": 1.0 + alpha * stats.sign_mean_excess(1),
        "ais/weight_negative_advantage": 1.0 + alpha * stats.sign_mean_excess(-1),
        "ais/n_tokens": float(n),
        "ais/nonfinite_tokens": float(stats.nonfinite),
    }
