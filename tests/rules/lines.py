"""Command lines as users write them, and what the driver says to each: shared by the tests of the rules."""

import pytest
from hydra.errors import HydraException

from tests.driver import compose, refusal, start

R, A, REF, M = (f"actor_rollout_ref.{node}" for node in ("rollout", "actor", "ref", "model"))
V = f"{R}.engine_kwargs.vllm"
RC = "algorithm.rollout_correction"
ENV = "ray_kwargs.ray_init.runtime_env.env_vars"

# An existing FSDP2 job, on verl's own ppo_trainer.
JOB = [
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=8",
    f"{R}.name=vllm",
    f"{R}.n=8",
    f"{R}.log_prob_micro_batch_size_per_gpu=16",
    f"{A}.strategy=fsdp2",
    f"{A}.ppo_micro_batch_size_per_gpu=16",
    f"{REF}.log_prob_micro_batch_size_per_gpu=16",
]


def said(model: str, overrides, **kwargs) -> str | None:
    """The driver's refusal of one command line, Hydra's included."""
    try:
        config = compose(f"{M}.path={model}", *overrides, **kwargs)
    except HydraException as error:
        return f"{error} | {error.__cause__}"
    return refusal(start, config)


def lines(table):
    """pytest parameters of (line, key) pairs; the line is its own id."""
    return [pytest.param(line.split(" "), key, id=line) for line, key in table]
