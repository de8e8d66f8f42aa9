"""The keys the driver writes: each with its reason, in one place, and once."""

import pytest
from omegaconf import OmegaConf

from tests.driver import compose, refusal
from tests.rules.lines import ENV, JOB, A, M, R
from verl_fp8.rules import fill
from verl_fp8.rules.run import judge, prepare
from verl_fp8.switches.hardware import Hardware, assume
from verl_fp8.tools.explain import REASONS

H100 = Hardware((9, 0), (13, 0), "2.20.2", "0.19.2")
B200 = Hardware((10, 0), (13, 0), "2.20.2", "0.19.2")
FSDP = ["+fp8=unified"]
MEGATRON = [*(o for o in JOB if not o.startswith(f"{A}.strategy")), "model_engine=megatron", "+fp8=unified_megatron",
            "fp8.recipe.exclude=['model.layers.0.*']", f"{R}.tensor_model_parallel_size=1"]  # fmt: skip


def job(model, line):
    """The composed configuration of one of the two jobs."""
    return compose(f"{M}.path={model}", *line, config_name="quickstart" if line is FSDP else "ppo_trainer")


@pytest.mark.parametrize("machine", [H100, B200], ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize("line", [FSDP, MEGATRON], ids=["fsdp", "megatron"])
def test_a_filled_key_has_a_reason_and_is_written(tiny_model, line, machine):
    """Kernels' environment, and Megatron's bf16 layers: the same words as ``verl-fp8 explain``, and nothing else."""
    config = job(tiny_model, line)
    before = OmegaConf.to_container(config, resolve=False)
    with assume(machine):
        keys = fill.keys(judge(config).run)
        prepare(config)
    paths = [key.path for key in keys]
    assert len(set(paths)) == len(paths) >= 2
    assert any(path.startswith(ENV) for path in paths)
    assert any(path.endswith("first_last_layers_bf16") for path in paths) is (line is MEGATRON)
    for key in keys:
        assert key.reason and key.reason in REASONS.values()
        assert OmegaConf.select(config, key.path) == key.value
    # Nothing beside them has changed.
    again = OmegaConf.create(before)
    fill.write(again, keys)
    assert OmegaConf.to_container(config, resolve=False) == OmegaConf.to_container(again, resolve=False) != before


@pytest.mark.parametrize("line", [FSDP, MEGATRON], ids=["fsdp", "megatron"])
def test_filling_a_filled_configuration_changes_nothing(tiny_model, line):
    """What was written is accepted and comes out the same, as on the second of two machines that share a recipe."""
    config = job(tiny_model, line)
    with assume(H100):
        prepare(config)
        filled = OmegaConf.to_container(config, resolve=False)
        assert refusal(prepare, config) is None
    assert OmegaConf.to_container(config, resolve=False) == filled


def test_nothing_is_filled_without_fp8_or_without_a_gpu(tiny_model):
    """A correction alone has no keys for the driver to write, and neither has a run on CPU."""
    with assume(H100):
        assert fill.keys(judge(compose("+is_correction=ais", f"{M}.path={tiny_model}")).run) == ()
    with assume(Hardware()):
        assert fill.keys(judge(job(tiny_model, FSDP)).run) == ()
