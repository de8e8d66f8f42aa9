"""The correction stage on verl's driver: reweights the advantages of a whole batch after verl has computed them.

Two methods of ``PPOTrainer`` are wrapped, none is replaced. ``_compute_advantage``: verl finishes, the stage reads log-probs
and advantages back from TransferQueue, reweights, stores and stamps the batch. ``_update_actor``: refuses a batch without
the stamp when a correction was asked for, and moves the engine's ``fp8/*`` figures to their own names.
"""

import torch
import wrapt
from tensordict import TensorDict

from verl_fp8.ais import AISConfig, ais_weights, apply_weights
from verl_fp8.errors import ConfigError
from verl_fp8.settings import CorrectionSettings

STAMP = "verl_fp8_correction"
FIELDS = ["advantages", "old_log_probs", "rollout_log_probs", "response_mask"]


def attach() -> None:
    """Wrap verl's V1 trainer, once a process. Raises if its methods are not there."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    if not isinstance(PPOTrainer.__dict__["_compute_advantage"], wrapt.FunctionWrapper):
        wrapt.wrap_function_wrapper(PPOTrainer, "_compute_advantage", _compute_advantage)
        wrapt.wrap_function_wrapper(PPOTrainer, "_update_actor", _update_actor)


def correction_of(config) -> CorrectionSettings | None:
    """The parsed ``is_correction`` node of a run's configuration, None without the group."""
    node = config.get("is_correction", None)
    return None if node is None else CorrectionSettings.parse(node)


def _compute_advantage(wrapped, trainer, args, kwargs):
    batch = wrapped(*args, **kwargs)
    metrics = kwargs["metrics"] if "metrics" in kwargs else args[1]
    correction = correction_of(trainer.config)
    method = "none" if correction is None else correction.method
    data = read(batch)
    if data is None:
        if method == "none":
            return batch
        raise ConfigError(
            f"+is_correction={method}",
            f"a batch without all of {', '.join(FIELDS)}",
            "set actor_rollout_ref.rollout.calculate_log_probs=true and algorithm.rollout_correction.bypass_mode=false",
        )
    metrics.update(mismatch(data))
    if method == "ais":
        batch, found = reweight(batch, data, AISConfig(**correction.parameters))
        metrics.update(found)
        batch.extra_info[STAMP] = method
    return batch


def _update_actor(wrapped, trainer, args, kwargs):
    batch = kwargs["batch"] if "batch" in kwargs else args[0]
    metrics = kwargs["metrics"] if "metrics" in kwargs else args[1]
    correction = correction_of(trainer.config)
    if correction is not None and correction.method != "none" and batch.extra_info.pop(STAMP, None) != correction.method:
        raise ConfigError(
            f"+is_correction={correction.method}",
            f"a batch whose advantages were not reweighted ({type(trainer).__name__} computes them past the stage)",
            "let its _compute_advantage call verl's, or remove is_correction",
        )
    batch = wrapped(*args, **kwargs)
    for key in [k for k in metrics if k.startswith("actor/fp8/")]:
        metrics[key.removeprefix("actor/")] = metrics.pop(key)
    return batch


def read(batch) -> TensorDict | None:
    """The batch's log-probs, advantages and mask out of TransferQueue, nested (rows, response length of each row).

    Args:
        batch: verl's KVBatchMeta.

    Returns:
        None if the run does not have them all.
    """
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS)
    return data if all(field in data.keys() for field in FIELDS) else None


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


def reweight(batch, data: TensorDict, config: AISConfig):
    """Apply AIS to one batch: read, reweight, store.

    Args:
        batch: verl's KVBatchMeta.
        data: what :func:`read` returned for it.

    Returns:
        The batch's handle after the new advantages were stored, and the ``ais/*`` metrics.
    """
    import transfer_queue as tq
    from verl.workers.utils.padding import response_to_nested

    padded = data.to_padded_tensor()
    result = ais_weights(
        padded["old_log_probs"],
        padded["rollout_log_probs"],
        padded["advantages"],
        padded["response_mask"].to(torch.bool),
        config,
    )
    advantages = apply_weights(padded["advantages"], result.weights)
    fields = TensorDict({"advantages": response_to_nested(advantages, data["response_mask"])}, batch_size=len(batch))
    batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
    return batch, dict(result.diagnostics)
