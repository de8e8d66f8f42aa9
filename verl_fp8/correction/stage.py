"""The correction stage on verl's driver: what ``is_correction`` does to a batch after verl has computed its advantages.

How it works, in ten lines. The rollout samples from a policy that differs a little from the trainer's, and the ratio
of the two must weigh the advantages before the update. verl computes advantages in one method of ``PPOTrainer`` and
updates in another, so both are wrapped and none is replaced::

    _compute_advantage   verl's; then the stage reads the batch back from TransferQueue, [rows, response length] each:
                         old_log_probs, rollout_log_probs float32, advantages, response_mask;
                         dumps them if asked, reweights (AIS) or makes sure that verl did (its own methods),
                         and stamps the batch
    _update_actor        refuses a batch without the stamp if a correction was asked for; then verl's;
                         then gives the engine's ``fp8/*`` figures their own names

What surprises: verl goes on without a word where a method of its own was not applied, so the stage looks for the
metric that the method logs. The arithmetic is in :mod:`verl_fp8.correction.ais` and
:mod:`verl_fp8.correction.reweight`.
"""

from typing import Any

import torch
import wrapt
from omegaconf import OmegaConf
from tensordict import TensorDict

from verl_fp8.correction.ais import AISResult, apply_weights
from verl_fp8.correction.dump import DumpWriter, run_of
from verl_fp8.correction.reweight import AISState, MiniBatches, ais_config, reweight
from verl_fp8.correction.verls_methods import rollout_correction
from verl_fp8.errors import ConfigError
from verl_fp8.switches.settings import CorrectionSettings
from verl_fp8.upstream import patched

STAMP = "verl_fp8_correction"
FIELDS = ["advantages", "old_log_probs", "rollout_log_probs", "response_mask"]


def attach() -> None:
    """Wrap verl's V1 trainer, once a process, unless its source calls the stage. Raises if its methods are not
    there."""
    from verl.trainer.ppo.v1 import trainer_base

    for name, wrapper in (("_compute_advantage", _compute_advantage), ("_update_actor", _update_actor)):
        there = isinstance(trainer_base.PPOTrainer.__dict__[name], wrapt.FunctionWrapper)
        if not there and not patched.carries(trainer_base, name):
            wrapt.wrap_function_wrapper(trainer_base.PPOTrainer, name, wrapper)


def correction_of(config) -> CorrectionSettings | None:
    """The parsed ``is_correction`` node of a run's configuration, None without the group."""
    node = config.get("is_correction", None)
    return None if node is None else CorrectionSettings.parse(node)


class Stage:
    """The stage of one trainer: its settings and what it carries from batch to batch (anew after a resume)."""

    def __init__(self, trainer) -> None:
        self.correction = correction_of(trainer.config)
        self.method = "none" if self.correction is None else self.correction.method
        self.ais = AISState()
        self.seen_tokens = False
        self.writer: DumpWriter | None = None
        if self.correction is not None and self.correction.dump is not None:
            config = OmegaConf.to_container(trainer.config, resolve=True)
            self.writer = DumpWriter(self.correction.dump, run_of(config), dumped_config(config), trainer.global_steps)

    @classmethod
    def of(cls, trainer) -> "Stage":
        """The stage of this trainer; one trainer has one."""
        if not hasattr(trainer, "_verl_fp8_stage"):
            trainer._verl_fp8_stage = cls(trainer)
        return trainer._verl_fp8_stage

    def correct(self, trainer, batch, metrics: dict[str, Any]):
        """Do to one batch what was asked for; returns its handle.

        Args:
            trainer: verl's trainer, which has just computed the batch's advantages.
            batch: verl's KVBatchMeta.
            metrics: the step's metrics, verl's own of this batch among them; ours are added.

        Raises:
            ConfigError: the batch lacks what the method needs, or verl did not apply its own method.
        """
        fields = [*FIELDS, "rm_scores"] if self.writer else FIELDS
        data = read(batch, fields)
        if data is None:
            if self.method == "none" and self.writer is None:
                return batch
            raise ConfigError(
                f"+is_correction={self.method}{'' if self.writer is None else ' with is_correction.dump'}",
                f"a batch without all of {', '.join(fields)}",
                "set actor_rollout_ref.rollout.calculate_log_probs=true and rollout_correction.bypass_mode=false",
            )
        self.require_tokens(data, metrics)
        found = mismatch(data)
        if self.writer is not None:
            rejected = metrics.get("rollout_corr/rollout_rs_masked_fraction", 0.0)
            marks = {"method": self.method, "rejected_fraction": repr(float(rejected))}
            found |= self.writer.write(
                data, batch.keys, batch.tags, trainer.global_steps, trainer.local_trigger_step, **marks
            )
        if self.method == "ais":
            result = self.reweigh(trainer, data, found)
            found |= result.diagnostics
            if self.correction.mode == "apply":
                batch = store(batch, data, result)
        elif self.method != "none":
            self.require_verl(metrics)
        metrics.update(found)
        if self.method != "none":
            batch.extra_info[STAMP] = self.method
        return batch

    def reweigh(self, trainer, data: TensorDict, found: dict[str, float]) -> AISResult:
        """AIS on one batch. ``found`` has the batch's mismatch and gets the metrics of delta."""
        delta, metrics = self.ais.delta(self.correction, trainer.global_steps, found.get("fp8/abs_logp_diff_mean"))
        found |= metrics
        padded = data.to_padded_tensor()
        rows = None
        if self.correction.scope == "mini_batch":
            rows = mini_batches(trainer).rows(padded.batch_size[0])
        result, self.ais.alpha = reweight(
            padded["old_log_probs"],
            padded["rollout_log_probs"],
            padded["advantages"],
            padded["response_mask"].to(torch.bool),
            ais_config(self.correction, delta),
            rows,
            self.ais.alpha,
        )
        if self.correction.mode == "shadow":
            result.diagnostics["ais/active"] = 0.0
        return result

    def require_tokens(self, data: TensorDict, metrics: dict[str, Any]) -> None:
        """Refuse a first batch that rejection sampling left empty: verl trains on it with a gradient of 0, without a
        word. Later ones are the run's own business and show in ``rollout_corr/rollout_rs_masked_fraction``."""
        rejects = "rollout_corr/rollout_rs_masked_fraction" in metrics
        if not self.seen_tokens and rejects and not bool(data["response_mask"].values().any()):
            raise ConfigError(
                f"+is_correction={self.method} with rejection sampling",
                "a first batch of which no token is left",
                "widen the bounds: is_correction.low and high, is_correction.max_k3 or rollout_rs_threshold",
            )
        self.seen_tokens = True

    def require_verl(self, metrics: dict[str, Any]) -> None:
        """Refuse to go on if verl logged nothing of the method it was given."""
        meant = rollout_correction(self.correction)
        wanted = ["rollout_corr/rollout_is_mean"] * (meant["rollout_is"] is not None)
        wanted += ["rollout_corr/rollout_rs_masked_fraction"] * (meant["rollout_rs"] is not None)
        missing = [name for name in wanted if name not in metrics]
        if missing:
            raise ConfigError(
                f"+is_correction={self.method}",
                f"a batch to which verl did not apply it (no metric {missing[0]})",
                "set rollout.calculate_log_probs=true and remove overrides of algorithm.rollout_correction",
            )


def _compute_advantage(wrapped, trainer, args, kwargs):
    batch = wrapped(*args, **kwargs)
    return after_advantages(trainer, batch, kwargs["metrics"] if "metrics" in kwargs else args[1])


def _update_actor(wrapped, trainer, args, kwargs):
    batch = kwargs["batch"] if "batch" in kwargs else args[0]
    before_update(trainer, batch)
    batch = wrapped(*args, **kwargs)
    name_metrics(kwargs["metrics"] if "metrics" in kwargs else args[1])
    return batch


def after_advantages(trainer, batch, metrics: dict[str, Any]):
    """What happens to a batch whose advantages verl has just computed; returns its handle."""
    return Stage.of(trainer).correct(trainer, batch, metrics)


def before_update(trainer, batch) -> None:
    """Refuse a batch that did not pass the stage.

    Raises:
        ConfigError: a correction was asked for and the batch has no stamp of it.
    """
    stage = Stage.of(trainer)
    if stage.method != "none" and batch.extra_info.pop(STAMP, None) != stage.method:
        raise ConfigError(
            f"+is_correction={stage.method}",
            f"a batch that did not pass the stage ({type(trainer).__name__} computes advantages past it)",
            "let its _compute_advantage call verl's, or remove is_correction",
        )


def name_metrics(metrics: dict[str, Any]) -> None:
    """Give the engine's figures, which verl logs as ``actor/fp8/*``, their own names; in place."""
    for key in [k for k in metrics if k.startswith("actor/fp8/")]:
        metrics[key.removeprefix("actor/")] = metrics.pop(key)


def mini_batches(trainer) -> MiniBatches:
    """How verl will cut this trainer's batches: what its ``_update_actor`` hands to the workers."""
    config = trainer.config.actor_rollout_ref
    # verl fills the table in _balance_batch, before any batch reaches the stage, and its dispatch cuts batches by it.
    dp_ranks = trainer.actor_rollout_wg._dispatch_info["actor"]
    return MiniBatches(
        size=config.actor.ppo_mini_batch_size * config.rollout.n,
        dp_size=max(dp_ranks) + 1,
        shuffle=config.actor.shuffle,
        seed=config.actor.data_loader_seed,
    )


def read(batch, fields: list[str] = FIELDS) -> TensorDict | None:
    """The batch's log-probs, advantages and mask out of TransferQueue, nested (rows, response length of each row).

    Args:
        batch: verl's KVBatchMeta.

    Returns:
        None if the run does not have them all.
    """
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    return data if all(field in data.keys() for field in fields) else None


def store(batch, data: TensorDict, result: AISResult):
    """Store the reweighted advantages; returns the batch's new handle.

    Args:
        batch: verl's KVBatchMeta.
        data: what :func:`read` returned for it.
        result: the weights of its padded rows.
    """
    import transfer_queue as tq
    from verl.workers.utils.padding import response_to_nested

    advantages = apply_weights(data["advantages"].to_padded_tensor(0.0), result.weights)
    fields = TensorDict({"advantages": response_to_nested(advantages, data["response_mask"])}, batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def mismatch(data: TensorDict) -> dict[str, float]:
    """``fp8/abs_logp_diff_{mean,max}``: |trainer - rollout| log-prob over the valid tokens with finite log-probs."""
    mask = data["response_mask"].values().bool()
    difference = (data["old_log_probs"].values().double() - data["rollout_log_probs"].values().double()).abs()[mask]
    difference = difference[difference.isfinite()]
    if difference.numel() == 0:
        return {}
    return {
        "fp8/abs_logp_diff_mean": float(difference.mean()),
        "fp8/abs_logp_diff_max": float(difference.max()),
    }


def dumped_config(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that bear on corrections, kept beside the data of a dump."""
    return {
        "is_correction": config["is_correction"],
        "fp8": config.get("fp8"),
        "rollout_correction": config["algorithm"].get("rollout_correction"),
        "adv_estimator": str(config["algorithm"]["adv_estimator"]),
        "loss_agg_mode": config["actor_rollout_ref"]["actor"]["loss_agg_mode"],
        "model": config["actor_rollout_ref"]["model"]["path"],
    }
