"""AIS over a trainer's batch: what lies between the mathematics (:mod:`verl_fp8.correction.ais`) and verl's trainer.

Which rows share one alpha, where delta comes from, what is carried from batch to batch (:class:`AISState`), and what
changed. Only AIS is computed here, on verl's driver; verl's own methods run inside verl
(:mod:`verl_fp8.correction.verls_methods`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from verl_fp8.correction.ais import AISConfig, AISResult, ais_weights, apply_weights
from verl_fp8.errors import ConfigError
from verl_fp8.switches.settings import CorrectionSettings

# With a floor of exactly 0 (two bit-identical engines) any difference at all is above it.
_SMALLEST_DELTA = 1e-12


def ais_config(settings: CorrectionSettings, delta: float | None = None) -> AISConfig:
    """The constants of AIS; `delta` replaces ``is_correction.delta`` (and has to where that is ``auto``).

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """
    parameters = dict(settings.parameters)
    if parameters.get("delta") == "auto" or delta is not None:
        parameters["delta"] = AISConfig.delta if delta is None else delta
    return AISConfig(**parameters)


@dataclass
class AISState:
    """What AIS carries from batch to batch. It lives in the trainer's process, so a resumed run starts it anew: the
    noise floor is measured again (``ais/noise_floor_steps`` counts from 1) and the moving average of alpha starts over.

    Attributes:
        first_step: training step at which the measurement of the noise floor began.
        floors: what was measured, mean |log-prob difference| (nats) by step.
        alpha: the last alpha, of the last batch or mini-batch; None before the first.
    """

    first_step: int | None = None
    floors: dict[int, list[float]] = field(default_factory=dict)
    alpha: float | None = None

    def delta(
        self, settings: CorrectionSettings, step: int, mean_abs_diff: float | None
    ) -> tuple[float, dict[str, float]]:
        """delta for this batch, and the metrics ``ais/delta`` and, with ``delta=auto``, ``ais/noise_floor``,
        ``ais/noise_floor_steps``.

        With ``auto`` the floor of the batches seen so far counts from the first one on: the first batch gets
        ``alpha_mis`` = 1 / delta_factor, and after ``delta_steps`` steps the floor stays as it is.

        Args:
            step: the training step, from 1.
            mean_abs_diff: mean |trainer - rollout| log-prob of this batch, nats; None if it has no usable token.
        """
        if settings.parameters.get("delta") != "auto":
            delta = ais_config(settings).delta
            return delta, {"ais/delta": delta}
        if mean_abs_diff is not None:
            self.first_step = step if self.first_step is None else self.first_step
            if step < self.first_step + settings.delta_steps:
                self.floors.setdefault(step, []).append(mean_abs_diff)
        measured = [value for values in self.floors.values() for value in values]
        floor = sum(measured) / len(measured) if measured else 0.0
        delta = max(settings.delta_factor * floor, _SMALLEST_DELTA)
        return delta, {"ais/delta": delta, "ais/noise_floor": floor, "ais/noise_floor_steps": float(len(self.floors))}


@dataclass(frozen=True)
class MiniBatches:
    """How verl will cut a batch into mini-batches (TrainingWorker.train_mini_batch in verl/workers/engine_workers.py).

    Attributes:
        size: rows of one mini-batch over all data-parallel ranks: ``ppo_mini_batch_size * rollout.n``.
        dp_size: data-parallel ranks; each gets a contiguous part of the batch and cuts that.
        shuffle: ``actor.shuffle``.
        seed: ``actor.data_loader_seed``; rank r shuffles with seed + r.
    """

    size: int
    dp_size: int = 1
    shuffle: bool = False
    seed: int = 42

    def rows(self, n_rows: int) -> list[torch.Tensor]:
        """The row numbers of each mini-batch, int64, in verl's order: through verl's own iterator, rank by rank.

        Raises:
            ConfigError: the rows do not divide, which verl's own padding of the batch rules out.
        """
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        if n_rows % self.size or self.size % self.dp_size:
            raise ConfigError(
                "is_correction.scope=mini_batch",
                f"{n_rows} rows for mini-batches of {self.size} on {self.dp_size} data-parallel ranks",
                "set is_correction.scope=batch, or actor_rollout_ref.actor.ppo_mini_batch_size so that it divides",
            )
        per_rank = []
        for rank in range(self.dp_size):
            part = torch.arange(n_rows).chunk(self.dp_size)[rank]
            iterator = tu.make_iterator(
                TensorDict({"row": part}, batch_size=len(part)),
                mini_batch_size=self.size // self.dp_size,
                epochs=1,
                seed=self.seed + rank,
                dataloader_kwargs={"shuffle": self.shuffle},
            )
            per_rank.append([batch["row"] for batch in iterator])
        return [torch.cat(parts) for parts in zip(*per_rank, strict=True)]


def reweight(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: AISConfig,
    rows: list[torch.Tensor] | None = None,
    previous_alpha: float | None = None,
) -> tuple[AISResult, float]:
    """AIS over a batch: one alpha for all of it, or one for each group of rows.

    Args:
        train_log_probs, rollout_log_probs, advantages, mask: as for :func:`verl_fp8.correction.ais.ais_weights`,
            (batch, response_len).
        rows: row numbers of the mini-batches, which together are all rows once; None for the whole batch.
        previous_alpha: what this function returned for the last batch, for the moving average; None for the first.

    Returns:
        The result, and the last alpha, to hand on. The result's diagnostics are those of
        :func:`verl_fp8.correction.ais.ais_weights` and ``ais/advantage_change`` (mean |A' - A| over mean |A|) and
        ``ais/changed_fraction`` (share of valid tokens whose advantage changes). With mini-batches alpha and its parts
        are means over them, weighted by tokens, with ``ais/alpha_min``, ``ais/alpha_max`` and ``ais/mini_batches``
        beside; all else is over the whole batch.
    """
    batch = (train_log_probs, rollout_log_probs, advantages, mask)
    if rows is None:
        result = ais_weights(*batch, config, previous_alpha)
        return replace(result, diagnostics=result.diagnostics | change(advantages, result.weights, mask)), result.alpha
    parts, alphas = [], []
    weights = torch.ones(mask.shape, dtype=torch.float32, device=train_log_probs.device)
    for row in rows:
        part = ais_weights(*(tensor[row] for tensor in batch), config, previous_alpha)
        previous_alpha = part.alpha
        weights[row] = part.weights
        parts.append(part.diagnostics)
        alphas.append(part.alpha)
    tokens = [part["ais/n_tokens"] for part in parts]
    mean = lambda key: sum(n * p[key] for n, p in zip(tokens, parts, strict=True)) / max(1.0, sum(tokens))
    diagnostics = dict(ais_weights(*batch, config).diagnostics)
    diagnostics |= {key: mean(key) for key in parts[0] if key.startswith("ais/alpha")}
    diagnostics |= weight_range(advantages, weights, mask)
    diagnostics |= {"ais/alpha_min": min(alphas), "ais/alpha_max": max(alphas), "ais/mini_batches": float(len(rows))}
    diagnostics["ais/active"] = max(part["ais/active"] for part in parts)
    return AISResult(weights, diagnostics["ais/alpha"], diagnostics | change(advantages, weights, mask)), previous_alpha


def change(advantages: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """``ais/advantage_change`` and ``ais/changed_fraction``, see :func:`reweight`; 0 where there is nothing to
    change."""
    keep = mask != 0
    before = advantages[keep]
    after = apply_weights(before, weights[keep])
    total, n = before.double().abs().sum().item(), max(1, before.numel())
    return {
        "ais/advantage_change": (after.double() - before.double()).abs().sum().item() / total if total else 0.0,
        "ais/changed_fraction": torch.count_nonzero(after != before).item() / n,
    }


def weight_range(advantages: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """``ais/weight_*`` from the weights themselves, for weights that no single alpha describes; 1 where there is no
    token."""
    keep = mask != 0
    a, w = advantages[keep], weights[keep].double()
    mean: Callable[[torch.Tensor], float] = lambda x: x.mean().item() if x.numel() else 1.0
    return {
        "ais/weight_min": w.min().item() if w.numel() else 1.0,
        "ais/weight_mean": mean(w),
        "ais/weight_max": w.max().item() if w.numel() else 1.0,
        "ais/weight_positive_advantage": mean(w[a > 0]),
        "ais/weight_negative_advantage": mean(w[a < 0]),
    }
