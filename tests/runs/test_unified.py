"""Both switches through stock verl, Ray and vLLM: two FSDP workers, rollout TP 2, tied weights, resume, exact."""

import json
import os

import pytest

from verl_fp8.hooks.leftovers import opened
from verl_fp8.trainer.checkpoint import RECIPE_FILE

pytestmark = pytest.mark.e2e

SWITCHES = ("+fp8=unified", "+is_correction=ais")
TWO = (
    "trainer.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.model.use_remove_padding=true",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "trainer.save_freq=3",
    "trainer.resume_mode=auto",
)


@pytest.fixture(scope="module")
def model(make_model):
    """The tiny model with tied embeddings."""
    return make_model(tied=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the first run saves and the next ones resume."""
    return tmp_path_factory.mktemp("two-workers")


@pytest.fixture(scope="module")
def first(train, model, folder):
    """Three steps on two workers, saved."""
    return train(model, folder, *SWITCHES, *TWO, "trainer.total_training_steps=3")


def test_the_run_ends_well(first):
    """Exit code 0 and one row of metrics a step."""
    assert first.code == 0, first.log[-3000:]
    assert len(first.steps) == 3


def test_every_process_says_what_it_runs_in(first):
    """Actor and reference policy announce the conversion, both TP ranks the verified load, all with one recipe."""
    trained = first.found(r"FP8: converted (\d+) of (\d+) linear layers .* \[(.*), backend reference, recipe (\w+)\]")
    rolled = first.found(r"FP8 rollout: (\d+) linear layers, kernel (\w+), recipe (\w+)")
    # Two decoder layers with seven linears each; lm_head is the fifteenth.
    assert {(n, m) for n, m, _, _ in trained} == {("14", "15")}
    assert {role for _, _, role, _ in trained} == {"actor", "reference policy"}
    assert [(n, kernel) for n, kernel, _ in rolled] == [("14", "ReferenceFp8BlockKernel")] * 2
    assert len({r for *_, r in trained} | {r for *_, r in rolled}) == 1


def test_a_weight_travels_as_one_byte(first):
    """One byte of code a weight plus four bytes of scale a 128x128 block, in every sync."""
    assert set(first.metric("fp8/sync_bytes_per_weight")) == {1 + 4 / 128**2}


def test_ais_acts_and_says_so(first):
    """alpha is positive and the advantages of some step really changed."""
    assert all(0 < alpha <= 1 for alpha in first.metric("ais/alpha"))
    assert 1.0 in first.metric("ais/active")


def test_a_dead_rank_ends_the_resumed_run(first, running, model, folder):
    """The saved run goes on at step 4; then one of the two trainers is killed: an error that says so within 60 s, and
    neither the other trainer nor a vLLM worker is left waiting."""
    assert first.code == 0
    saved = json.loads((folder / "checkpoints" / "global_step_3" / "actor" / RECIPE_FILE).read_text())
    assert saved["recipe"]["scale_format"] == "fp32" and len(saved["layers"]) == 14
    with running(model, folder, *SWITCHES, *TWO, "trainer.total_training_steps=400", "trainer.save_freq=-1") as run:
        run.wait_for_steps(1)
        assert run.steps[0]["training/global_step"] == 4
        paths = opened(run.processes())
        ranks = run.processes("ray::WorkerDict")
        assert len(ranks) == 2
        ranks[1].kill()
        assert run.process.wait(timeout=60) != 0
        assert "ActorDiedError" in run.log and "WorkerDict" in run.log
        assert not run.wait_for_processes(30)
        assert not [path for path in paths if os.path.exists(path)]


def test_exact_mode_has_no_mismatch(train, tiny_model, tmp_path):
    """fp8.exact=true: the largest log-prob difference over all tokens of ten steps with real updates is exactly 0."""
    run = train(tiny_model, tmp_path, *SWITCHES, "fp8.exact=true", "trainer.total_training_steps=10")
    assert run.code == 0, run.log[-3000:]
    assert run.metric("fp8/abs_logp_diff_max") == [0.0] * 10
    assert run.metric("ais/alpha") == [0.0] * 10
    assert run.metric("ais/active") == [0.0] * 10
    # verl computes k3 as exp(d) - d - 1, which is exactly 0 for d = 0.
    assert run.metric("rollout_corr/k3_kl") == [0.0] * 10
    rewards = run.metric("critic/rewards/mean")
    assert min(run.metric("actor/grad_norm")) > 0
    # From 1/64 (a random character) past a half within ten steps, in every precision tried.
    assert rewards[0] < 0.1 and rewards[-1] > 0.5


def test_rollout_mode_with_bf16_transport(train, tiny_model, tmp_path):
    """+fp8=rollout with fp8.weight_sync=bf16: bf16 actor, FP8 rollout quantised on arrival, two bytes a weight."""
    run = train(
        tiny_model,
        tmp_path,
        "+fp8=rollout",
        "+is_correction=ais",
        "fp8.weight_sync=bf16",
        "trainer.total_training_steps=2",
    )
    assert run.code == 0, run.log[-3000:]
    assert set(run.metric("fp8/sync_bytes_per_weight")) == {2.0}
    assert run.found(r"FP8 rollout of (\d+) of (\d+) linear layers, actor in bf16") == [("14", "15")]
    assert not run.found(r"FP8: converted")
    assert all(alpha > 0 for alpha in run.metric("ais/alpha"))
