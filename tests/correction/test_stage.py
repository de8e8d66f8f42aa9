"""The stage on verl's own trainer: real PPOTrainer._compute_advantage on batches in a real TransferQueue; only workers
are absent."""

import functools
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl_fp8.correction.ais import ais_weights, apply_weights
from verl_fp8.correction.dump import files, read_step
from verl_fp8.correction.reweight import MiniBatches
from verl_fp8.correction.stage import STAMP, read
from verl_fp8.errors import ConfigError
from verl_fp8.hooks import register
from verl_fp8.tools.overrides import compose

pytestmark = pytest.mark.slow

BASE = ["actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.rollout.name=vllm", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]  # fmt: skip
LENGTHS = (5, 1, 7, 3, 6, 6, 2, 4, 3, 3, 8, 1, 2, 2, 5, 4)


@pytest.fixture(scope="module", autouse=True)
def queue():
    """A TransferQueue of this machine's own, as main_ppo starts it."""
    import ray
    import transfer_queue as tq

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    register.attach_stage()
    yield tq
    tq.close()
    ray.shutdown()


composed = functools.cache(lambda overrides: compose([*BASE, *overrides]))


def trainer_of(*overrides, step=1, dp_size=1):
    """verl's trainer with everything its _compute_advantage needs; the workers are not started."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    trainer = PPOTrainerSync.__new__(PPOTrainerSync)
    trainer.config = composed(overrides)
    trainer.global_steps, trainer.local_trigger_step = step, 0
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(dp_size))})
    return trainer


def put(tq, *, seed=0, spread=0.05, padding=0, fields=()):
    """Four prompts with four responses each, and `padding` of verl's padding rows, in the queue; the batch's handle."""
    from verl.utils import tensordict_utils as tu

    lengths = [*LENGTHS, *[1] * padding]
    rows = {name: [] for name in ("old_log_probs", "rollout_log_probs", "response_mask", "rm_scores")}
    for i, n in enumerate(lengths):
        g = torch.Generator().manual_seed(1000 * seed + i)
        rows["old_log_probs"].append(-2 * torch.rand(n, generator=g))
        rows["rollout_log_probs"].append(rows["old_log_probs"][-1] + spread * torch.randn(n, generator=g))
        rows["response_mask"].append(torch.full((n,), int(i < len(LENGTHS))))
        rows["rm_scores"].append(torch.nn.functional.pad(torch.rand(1, generator=g), (n - 1, 0)))
    data = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in rows.items()}
    for name in fields:
        del data[name]
    prompts = [uuid.uuid4().hex for _ in range(4)]
    uids = [prompts[i // 4] if i < len(LENGTHS) else "pad" + uuid.uuid4().hex for i in range(len(lengths))]
    table = tu.get_tensordict({**data, "uid": uids})
    keys = [f"{uid}_{i % 4}_0" for i, uid in enumerate(uids)]
    tags = [{"is_padding": i >= len(LENGTHS), "seq_len": n} for i, n in enumerate(lengths)]
    return tq.kv_batch_put(keys=keys, partition_id="train", fields=table, tags=tags)


def advantages_of(batch):
    """The padded advantages, log-probs and mask of a batch in the queue."""
    padded = read(batch).to_padded_tensor()
    return padded["advantages"], padded["old_log_probs"], padded["rollout_log_probs"], padded["response_mask"].bool()


def test_ais_reweights_what_verl_stored(queue):
    """The advantages in the queue are verl's own times AIS's weights, bit for bit; the batch is stamped, the metrics
    are there."""
    plain = advantages_of(trainer_of("+is_correction=none")._compute_advantage(put(queue), metrics={}))
    metrics = {}
    batch = trainer_of("+is_correction=ais")._compute_advantage(put(queue), metrics=metrics)
    found, old, rollout, mask = advantages_of(batch)
    result = ais_weights(old, rollout, plain[0], mask)
    assert torch.equal(found, apply_weights(plain[0], result.weights))
    assert not torch.equal(found, plain[0])
    assert batch.extra_info[STAMP] == "ais"
    assert {k: metrics[k] for k in result.diagnostics} == result.diagnostics
    assert metrics["ais/active"] == 1.0
    assert metrics["ais/delta"] == 0.02
    assert metrics["fp8/abs_logp_diff_mean"] == pytest.approx(metrics["ais/mean_abs_logp_diff"], rel=1e-6)
    assert metrics["fp8/abs_logp_diff_max"] >= metrics["fp8/abs_logp_diff_mean"]


def test_shadow_applies_nothing(queue):
    """mode=shadow logs the same alpha and what would change; the advantages in the queue stay verl's, bit for bit."""
    plain = advantages_of(trainer_of("+is_correction=none")._compute_advantage(put(queue), metrics={}))[0]
    acting, shadow = {}, {}
    trainer_of("+is_correction=ais")._compute_advantage(put(queue), metrics=acting)
    batch = trainer_of("+is_correction=ais", "is_correction.mode=shadow")._compute_advantage(put(queue), metrics=shadow)
    assert torch.equal(advantages_of(batch)[0], plain)
    assert shadow["ais/active"] == 0.0
    assert shadow["ais/advantage_change"] == acting["ais/advantage_change"] > 0
    assert {k: v for k, v in shadow.items() if k.startswith("ais/") and k != "ais/active"} == {
        k: v for k, v in acting.items() if k.startswith("ais/") and k != "ais/active"
    }
    assert batch.extra_info[STAMP] == "ais"


def test_mini_batches_of_the_trainer(queue):
    """scope=mini_batch cuts by what the trainer hands to its workers: ppo_mini_batch_size * n rows over its ranks."""
    keys = ("+is_correction=ais", "is_correction.scope=mini_batch", "actor_rollout_ref.actor.shuffle=true")
    metrics = {}
    plain = advantages_of(trainer_of("+is_correction=none")._compute_advantage(put(queue), metrics={}))[0]
    batch = trainer_of(*keys, dp_size=2)._compute_advantage(put(queue), metrics=metrics)
    found, old, rollout, mask = advantages_of(batch)
    seed = composed(keys).actor_rollout_ref.actor.data_loader_seed
    groups = MiniBatches(size=8, dp_size=2, shuffle=True, seed=seed).rows(16)
    assert metrics["ais/mini_batches"] == len(groups) == 2.0
    for rows in groups:
        weights = ais_weights(old[rows], rollout[rows], plain[rows], mask[rows]).weights
        assert torch.equal(found[rows], apply_weights(plain[rows], weights))


def test_delta_auto_and_ema_carry_over_batches(queue):
    """One trainer's second batch uses what its first measured; another trainer, as after a resume, measures anew."""
    keys = ("+is_correction=ais", "is_correction.delta=auto", "is_correction.delta_steps=1", "is_correction.ema=0.5")
    trainer, first, second, resumed = trainer_of(*keys), {}, {}, {}
    trainer._compute_advantage(put(queue, spread=0.01), metrics=first)
    trainer.global_steps = 2
    trainer._compute_advantage(put(queue, spread=0.05), metrics=second)
    assert first["ais/alpha_mis"] == pytest.approx(0.5, rel=1e-6)
    assert second["ais/noise_floor"] == first["ais/noise_floor"]
    assert second["ais/alpha_mis"] == 1.0
    assert second["ais/alpha"] == pytest.approx((first["ais/alpha"] + second["ais/alpha_batch"]) / 2, rel=1e-12)
    trainer_of(*keys, step=2)._compute_advantage(put(queue, spread=0.05), metrics=resumed)
    assert resumed["ais/noise_floor"] > 2 * first["ais/noise_floor"]


@pytest.mark.parametrize("method", ["tis", "tis_seq", "icepop", "mis", "geo_rs", "k3_rs"])
def test_verls_methods_run_in_verl(queue, method):
    """verl stores its own weights or mask, its advantages stay as they are, and the batch is stamped."""
    metrics = {}
    bounds = ["is_correction.low=0.9", "is_correction.high=1.1"] if method == "geo_rs" else []
    batch = trainer_of(f"+is_correction={method}", *bounds)._compute_advantage(put(queue, spread=0.3), metrics=metrics)
    assert batch.extra_info[STAMP] == method
    weighted = method in ("tis", "tis_seq", "icepop", "mis")
    assert ("rollout_is_weights" in batch.fields) == weighted
    assert ("rollout_corr/rollout_is_mean" in metrics) == weighted
    kept = advantages_of(batch)[3].sum()
    assert (kept < sum(LENGTHS)) == (method in ("mis", "geo_rs", "k3_rs"))
    assert not any(key.startswith("ais/") for key in metrics)


def test_ais_after_rejection_sampling(queue):
    """With verl's rollout_rs beside it, AIS counts the tokens that verl kept."""
    keys = (
        "+is_correction=ais",
        "algorithm.rollout_correction.rollout_rs=token_k3",
        "algorithm.rollout_correction.rollout_rs_threshold=0.01",
    )
    metrics = {}
    trainer_of(*keys)._compute_advantage(put(queue, spread=0.1), metrics=metrics)
    assert 0 < metrics["ais/n_tokens"] < sum(LENGTHS)
    assert metrics["ais/n_tokens"] == pytest.approx(
        sum(LENGTHS) * (1 - metrics["rollout_corr/rollout_rs_masked_fraction"]), rel=1e-5
    )


def test_verls_padding_rows_change_nothing(queue):
    """Rows that verl adds to fill a batch have mask 0: alpha and the real rows' advantages are the same without
    them."""
    plain, padded = {}, {}
    a = advantages_of(trainer_of("+is_correction=ais")._compute_advantage(put(queue), metrics=plain))[0]
    b = advantages_of(trainer_of("+is_correction=ais")._compute_advantage(put(queue, padding=8), metrics=padded))[0]
    assert torch.equal(a, b[: len(LENGTHS)])
    assert {k: v for k, v in padded.items() if k.startswith("ais/")} == {
        k: v for k, v in plain.items() if k.startswith("ais/")
    }


def test_a_batch_without_rollout_log_probs_is_refused(queue):
    """verl would go on uncorrected, without a word."""
    for method in ("ais", "tis"):
        with pytest.raises(ConfigError, match="calculate_log_probs"):
            trainer_of(f"+is_correction={method}")._compute_advantage(
                put(queue, fields=["rollout_log_probs"]), metrics={}
            )


def test_verl_not_applying_its_method_is_refused(queue):
    """A recipe that took verl's settings away after the checks: no metric of verl's, no training."""
    trainer = trainer_of("+is_correction=tis")
    trainer.config = OmegaConf.merge(trainer.config, {"algorithm": {"rollout_correction": {"rollout_is": None}}})
    with pytest.raises(ConfigError, match="rollout_is_mean"):
        trainer._compute_advantage(put(queue), metrics={})


def test_rejecting_everything_from_the_start_is_refused(queue):
    """verl would train on with a gradient of 0; a later batch of that kind is logged by verl and passes."""
    keys = ("+is_correction=geo_rs", "is_correction.low=0.9999999", "is_correction.high=1.0000001")
    with pytest.raises(ConfigError, match=r"no token is left.*is_correction\.low"):
        trainer_of(*keys)._compute_advantage(put(queue), metrics={})
    trainer, metrics = trainer_of(*keys), {}
    trainer._compute_advantage(put(queue, spread=0.0), metrics=metrics)
    trainer._compute_advantage(put(queue), metrics=metrics)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1.0)


@pytest.mark.parametrize("method", ["ais", "tis"])
def test_an_unstamped_batch_is_not_trained_on(queue, method):
    """A trainer that computes its advantages past the stage must not reach the actor."""
    with pytest.raises(ConfigError, match="did not pass the stage"):
        trainer_of(f"+is_correction={method}")._update_actor(put(queue), metrics={})


def test_the_dump_is_what_verl_computed(queue, tmp_path):
    """A file has verl's advantages before reweighting, the log-probs and scores, one group a prompt, and no padding
    rows."""
    plain = advantages_of(trainer_of("+is_correction=none")._compute_advantage(put(queue), metrics={}))
    metrics, folder = {}, tmp_path / "dump"
    trainer = trainer_of("+is_correction=ais", f"is_correction.dump={folder}")
    batch = trainer._compute_advantage(put(queue, padding=8), metrics=metrics)
    (path,) = files(folder)
    step = read_step(path)
    mask = plain[3]
    for name, values in zip(("advantages", "old_log_probs", "rollout_log_probs"), plain, strict=False):
        assert torch.equal(step.tensors[name], values[mask]), name
    assert step.tensors["lengths"].tolist() == list(LENGTHS)
    assert step.tensors["groups"].tolist() == [i // 4 for i in range(16)]
    scores = queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rm_scores"])["rm_scores"]
    assert torch.equal(step.tensors["scores"], torch.stack([row.sum() for row in scores.unbind()])[:16])
    assert (step.step, step.metadata["method"]) == (1, "ais")
    assert metrics["fp8/dump_bytes"] == path.stat().st_size
    assert Path(folder).stat().st_mode & 0o777 == 0o777 & ~_umask()


def test_any_run_can_be_dumped(queue, tmp_path):
    """is_correction=none with a dump reads and writes, and leaves the batch alone."""
    metrics = {}
    trainer = trainer_of("+is_correction=none", f"is_correction.dump={tmp_path / 'd'}")
    batch = trainer._compute_advantage(put(queue), metrics=metrics)
    assert len(files(tmp_path / "d")) == 1
    assert STAMP not in batch.extra_info
    with pytest.raises(ConfigError, match="rm_scores"):
        trainer._compute_advantage(put(queue, fields=["rollout_log_probs"]), metrics={})


def _umask():
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask
