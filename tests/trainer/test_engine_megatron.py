"""``+fp8=unified_megatron`` on the Python of real wheels: TransformerEngine, megatron-core, Megatron-Bridge, verl's
engine.

What runs is in megatron_checks.py, one process a version. The newest megatron-core and bridge ask for Python 3.12, so
the newest core is checked here without its bridge, and the bridge with the core it goes with.
"""

import functools
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.driver import compose
from tests.trainer.hosted import checks_in, judge, selected, start
from tests.wheels import unpacked
from verl_fp8.rules.run import validate_run
from verl_fp8.switches.hardware import MEGATRON_CORE, Hardware, assume
from verl_fp8.trainer.megatron_environment import SCALES_VARIABLE

HERE = Path(__file__).parent
A = "actor_rollout_ref.actor"
TE = "2.20.2"
# The floor of the claimed range with its bridge, and its last version, whose wheel is for Python 3.12.
VERSIONS = {"0.16.1": ("megatron-bridge", "0.3.1"), "0.19.2": None}
CHECKS = checks_in(HERE / "megatron_checks.py")
CASES = [(v, c) for v, bridge in VERSIONS.items() for c in CHECKS if bridge or c.startswith("check_core")]


def written(model: str, *overrides: str) -> tuple[dict, dict]:
    """The keys of TransformerConfig and of OptimizerConfig that a validated command line holds, beside verl's own."""
    line = ["model_engine=megatron", f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]  # fmt: skip
    config = compose(*line, "+fp8=unified_megatron", *overrides, config_name="ppo_trainer")
    stock = compose(*line, config_name="ppo_trainer")
    with assume(Hardware((9, 0), (13, 0), TE, "0.19.2")):
        validate_run(config)
    path = f"{A}.megatron.override_transformer_config"
    own = OmegaConf.select(stock, path)
    ours = {k: v for k, v in OmegaConf.select(config, path).items() if k not in own}
    return ours, dict(config.actor_rollout_ref.actor.optim.override_optimizer_config)


@pytest.fixture(scope="module")
def results(request, pytestconfig, make_model):
    """version -> check -> what it said; one process a version."""

    @functools.cache
    def of(version: str) -> dict[str, str]:
        cache, bridge = pytestconfig.cache, VERSIONS[version]
        folders = [unpacked(cache, "megatron-core", version, python=None if bridge else "3.12")]
        folders += [unpacked(cache, *bridge)] if bridge else []
        models = [make_model("qwen3"), make_model("qwen3_moe")]
        transformer, optimizer = written(models[0])
        ends, _ = written(models[0], "fp8.recipe.exclude=['model.layers.0.*']")
        ends = ends | {"num_layers_at_end_in_bf16": 1}
        variables = {
            "VERL_FP8_TEST_WRITTEN": json.dumps({"transformer": [transformer, ends], "optimizer": optimizer}),
            SCALES_VARIABLE: "1",
        }
        te = unpacked(cache, "transformer_engine", TE)
        arguments = [str(te), json.dumps(models if bridge else []), *map(str, folders)]
        names = [parameters["check"] for parameters in selected(request, version=version)]
        return start(HERE / "megatron_checks.py", *arguments, names=names, timeout=600, **variables)

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("version", "check"), CASES)
def test_megatron(results, version, check):
    """One check of megatron_checks.py on one version of megatron-core."""
    judge(results(version)[check], CHECKS[check])


def test_the_versions_are_the_ends_of_the_claimed_range():
    """What is checked is what is claimed."""
    assert all(version in MEGATRON_CORE for version in VERSIONS)
    assert "0.15.3" not in MEGATRON_CORE and "0.20.0" not in MEGATRON_CORE
