"""``verl-fp8 explain``: what it lists is what the switches do, read off composed configurations."""

import functools
import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest
from omegaconf import OmegaConf

from verl_fp8.rules.groups import GROUPS
from verl_fp8.switches.hardware import Hardware, assume
from verl_fp8.switches.settings import METHODS
from verl_fp8.tools.explain import ABSENT, REASONS, explain, explain_command, hydra_value, shell, without_switches
from verl_fp8.tools.overrides import compose, validate

HOPPER = Hardware((9, 0), (13, 0), "2.20.2")
BLACKWELL = Hardware((10, 0), (13, 0), "2.20.2")
MEGATRON = Hardware((9, 0), (13, 0), "2.20.2", "0.19.2")
V = "actor_rollout_ref.rollout.engine_kwargs.vllm"
# Every group at least once, and on both kinds of GPU.
LINES = [
    (None, "+fp8=unified +is_correction=ais"),
    (None, "+fp8=rollout +is_correction=none fp8.lm_head=fp32"),
    (HOPPER, "+fp8=unified +is_correction=icepop is_correction.low=0.8"),
    (BLACKWELL, "+fp8=unified"),
    *((None, f"+is_correction={method}") for method in METHODS if method not in ("ais", "none", "icepop")),
]
IDS = [f"{'cpu' if h is None else h.capability[0]}-{line}" for h, line in LINES]


@pytest.fixture(scope="module")
def job(root, tiny_model):
    """The overrides of an ordinary job, on a recipe of verl's own keys."""
    return [
        "--config-dir",
        str(root / "recipes"),
        "--config-name",
        "quickstart",
        f"actor_rollout_ref.model.path={tiny_model}",
        "trainer.resume_mode=disable",
    ]


@functools.cache
def _explained(job, hardware, line):
    with assume(hardware or Hardware()):
        return explain([*job, *line.split()])


def explained(job, hardware, line):
    """The settings of a line, computed once a module: each costs three compositions."""
    return _explained(tuple(job), hardware, line)


def fragment(text: str) -> tuple[list[str], list[str]]:
    """The two arrays of the shell fragment, as bash itself reads them."""
    script = text + "\nprintf '%s\\0' \"${STOCK[@]}\"; printf '\\1'; printf '%s\\0' \"${VERL_FP8[@]}\""
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    return tuple([a for a in part.split("\0") if a] for part in out.split("\1"))


@pytest.mark.slow
@pytest.mark.parametrize(("hardware", "line"), LINES, ids=IDS)
def test_every_setting_has_a_reason_and_was_different(job, hardware, line):
    """Whatever differs between the two compositions is listed with a reason, and nothing that is equal."""
    settings = explained(job, hardware, line)
    assert settings
    for s in settings:
        assert s.reason is not None, s.path
        assert s.old != s.new, s.path


@pytest.mark.slow
def test_every_reason_is_needed(job, tiny_model, tmp_path):
    """The table of reasons holds no pattern that no setting of any switch falls under."""
    found = [s.path for hardware, line in LINES for s in explained(job, hardware, line)]
    # Another job: verl's default strategy, which is fsdp, and a recipe that had switched the rollout's log-probs off.
    body = "actor_rollout_ref: {rollout: {calculate_log_probs: false}}"
    (tmp_path / "mine.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{body}\n")
    base = [
        "--config-dir",
        str(tmp_path),
        "--config-name",
        "mine",
        f"actor_rollout_ref.model.path={tiny_model}",
        "actor_rollout_ref.rollout.name=vllm",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    ]
    settings = {s.path: s for s in explained(base, HOPPER, "+fp8=unified")}
    strategy = settings["actor_rollout_ref.actor.strategy"]
    assert (strategy.old, strategy.new) == ("fsdp", "fsdp2") and "FSDP2" in strategy.reason
    # Megatron, which is another base: the last layer in bf16, so that its keys for that are there as well.
    line = "+fp8=unified_megatron fp8.recipe.exclude=['model.layers.1.*']"
    megatron = {s.path: s for s in explained([*base, "model_engine=megatron"], MEGATRON, line)}
    assert all(s.reason is not None for s in megatron.values())
    assert megatron["ray_kwargs.ray_init.runtime_env.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES"].new == "1"
    assert megatron["actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_at_end_in_bf16"].new == 1
    assert not any(path.startswith("te.") for path in megatron)
    used = {next(p for p in REASONS if fnmatchcase(path, p)) for path in [*found, *settings, *megatron]}
    assert set(REASONS) == used


@pytest.mark.slow
@pytest.mark.parametrize(("hardware", "line"), LINES, ids=IDS)
def test_the_fragment_composes_what_the_switches_compose(job, hardware, line):
    """Pasted instead of the switches, the fragment as bash reads it gives the same configuration and layers."""
    switches, settings = line.split(), explained(job, hardware, line)
    with assume(hardware or Hardware()):
        stock, ours = fragment(shell(settings))
        by_hand, by_switch = compose([*job, *stock, *ours]), compose([*job, *switches])
        assert validate(by_hand) == validate(by_switch)
    computed = {s.path for s in settings if s.computed}
    for path in [p for p in computed if OmegaConf.select(by_hand, p, default=ABSENT) != ABSENT]:
        assert path.startswith(V) and OmegaConf.select(by_switch, path) is None
    for node in (by_hand, by_switch):
        OmegaConf.set_struct(node, False)
        for key in {p.removeprefix(f"{V}.").split(".")[0] for p in computed if p.startswith(V)}:
            node.actor_rollout_ref.rollout.engine_kwargs.vllm.pop(key, None)
    assert OmegaConf.to_container(by_hand, resolve=True) == OmegaConf.to_container(by_switch, resolve=True)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["+is_correction=tis", "+fp8=unified +is_correction=ais"])
def test_the_first_part_runs_on_stock_verl(job, line):
    """Stock verl, without this package's plugin, composes and validates the part that is said to be its own."""
    stock, _ = fragment(shell(explained(job, HOPPER, line)))
    code = """
import sys, verl
from verl_fp8.tools.check import compose
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
config = compose(sys.argv[1:])
assert "verl_fp8.hooks.verl_plugin" not in sys.modules
validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
print(type(rollout).__module__, config.algorithm.rollout_correction.rollout_is)
"""
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_PLATFORM": ""}
    run = subprocess.run(
        [sys.executable, "-c", code, *job, *stock], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-2:] == ["verl.workers.config.rollout", "token" if "tis" in line else "None"]


def test_a_recipes_own_switches_are_undone(job, tmp_path, tiny_model):
    """Groups named in a recipe's defaults are left out of the comparison's other half too."""
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, fp8: unified, is_correction: ais, _self_]\n")
    line = [
        "--config-dir",
        str(tmp_path),
        "--config-name",
        "mine",
        f"actor_rollout_ref.model.path={tiny_model}",
        "fp8.recipe.eps=0.5",
    ]
    stock = compose(without_switches(line))
    assert not set(GROUPS) & set(stock)
    assert stock.actor_rollout_ref.actor._target_ == "verl.workers.config.FSDPActorConfig"


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 1e-6, "fp8", "0.5_5.0", "true", "", "a b", "it's", "x\\y", "${fp8.mode}", ["a", 1], {"k": [1]}],
)
def test_values_survive_hydras_grammar(value):
    """What is printed is read back by Hydra's own parser as the same value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(f"k={hydra_value(value)}").value() == value


def test_a_refused_run_is_refused_here_too(job, capsys):
    """Exit 2 and the sentence that the run itself would end with."""
    assert explain_command([*job, "+fp8=unified", "fp8.recipe.eps=-1"]) == 2
    assert "fp8.recipe.eps" in capsys.readouterr().err


def test_the_command_prints_a_list_and_json(job, capsys):
    """Old value, new value and reason of each setting; without a switch it says that there is none."""
    assert explain_command([*job, "+is_correction=tis"]) == 0
    out = capsys.readouterr().out
    assert "algorithm.rollout_correction.rollout_is: null -> token" in out
    assert explain_command(["--json", *job, "+is_correction=tis"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["algorithm.rollout_correction.rollout_is"]["old"] is None
    assert explain_command(job) == 0
    assert "stock verl" in capsys.readouterr().out
