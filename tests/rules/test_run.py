"""Real command lines, composed by Hydra, judged by verl's driver: read, judged and filled once a start."""

import importlib
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from tests.driver import SWITCHES, compose, refusal, start
from tests.rules.lines import JOB, RC, A, M, R, V, lines, said
from verl_fp8.hooks import leftovers
from verl_fp8.rules import fill, run
from verl_fp8.rules.run import judge, prepare, validate_run
from verl_fp8.switches.hardware import Hardware, assume
from verl_fp8.tools.overrides import validate

# (overrides beside both switches, what the message must name)
BAD_VALUES = [
    ("fp8.mode=foo", "fp8.mode"),
    ("fp8.mode=null", "fp8.mode"),
    ("fp8.mode=true", "fp8.mode"),
    ("fp8.backend=te2", "fp8.backend"),
    ("fp8.backend=1", "fp8.backend"),
    ("fp8.weight_sync=fp16", "fp8.weight_sync"),
    ("fp8.weight_sync=null", "fp8.weight_sync"),
    ("fp8.sync_timeout=-1", "fp8.sync_timeout"),
    ("fp8.sync_timeout=0", "fp8.sync_timeout"),
    ("fp8.sync_timeout=inf", "fp8.sync_timeout"),
    ("fp8.sync_timeout=abc", "fp8.sync_timeout"),
    ("fp8.sync_timeout=true", "fp8.sync_timeout"),
    ("fp8.sync_timeout=null", "fp8.sync_timeout"),
    ("fp8.exact=1", "fp8.exact"),
    ("fp8.exact=maybe", "fp8.exact"),
    ("fp8.lm_head=fp16", "fp8.lm_head"),
    ("fp8.rollout_kernel=triton", "fp8.rollout_kernel"),
    ("fp8.recipe=null", "fp8.recipe"),
    ("fp8.recipe=fast", "fp8.recipe"),
    ("+fp8.bogus=1", "fp8.bogus"),
    ("+fp8.weight_block=[64,64]", "fp8.weight_block"),
    ("+fp8.recipe.bogus=1", "fp8.recipe.bogus"),
    ("+fp8.recipe.activation_block=[1,64]", "fp8.recipe.activation_block"),
    ("+fp8.recipe.fmt=e5m2", "fp8.recipe.fmt"),
    ("fp8.recipe.weight_block=[64]", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=[0,128]", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=[128.0,128]", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=[true,128]", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=128", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=large", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=null", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block={rows:128}", "fp8.recipe.weight_block"),
    ("fp8.recipe.weight_block=[96,96]", "fp8.recipe.weight_block"),
    ("fp8.recipe.scale_format=e8m0", "fp8.recipe.scale_format"),
    ("fp8.recipe.scale_format=null", "fp8.recipe.scale_format"),
    ("fp8.recipe.eps=-1", "fp8.recipe.eps"),
    ("fp8.recipe.eps=true", "fp8.recipe.eps"),
    ("fp8.recipe.eps=nan", "fp8.recipe.eps"),
    ("fp8.recipe.eps=small", "fp8.recipe.eps"),
    ("fp8.recipe.backward=bf16", "fp8.recipe.backward"),
    ("fp8.recipe.exclude=lm_head", "fp8.recipe.exclude"),
    ("fp8.recipe.exclude=[1]", "fp8.recipe.exclude"),
    ("fp8.recipe.exclude=[no.such.layer]", "no.such.layer"),
    ("fp8.recipe.exclude=['*.q_proj']", "fp8.recipe.exclude"),
    ("fp8.recipe.exclude=['*']", "fp8.recipe.exclude"),
    ("is_correction.method=null", "is_correction.method"),
    ("is_correction.method=foo", "is_correction.method"),
    ("is_correction.method=tis", "is_correction.delta"),
    ("+is_correction.bogus=1", "is_correction.bogus"),
    ("is_correction.clip=-1", "is_correction.clip"),
    ("is_correction.clip=true", "is_correction.clip"),
    ("is_correction.clip=abc", "is_correction.clip"),
    ("is_correction.delta=0", "is_correction.delta"),
    ("is_correction.delta=true", "is_correction.delta"),
    ("is_correction.gamma=null", "is_correction.gamma"),
    ("is_correction.beta_var=-1", "is_correction.beta_var"),
    ("is_correction.eps=nan", "is_correction.eps"),
    ("is_correction.level=word", "is_correction.level"),
    ("is_correction.scope=epoch", "is_correction.scope"),
    ("is_correction.mode=off", "is_correction.mode"),
    ("is_correction.ema=1.5", "is_correction.ema"),
    ("is_correction.ema=true", "is_correction.ema"),
    ("is_correction.delta=often", "is_correction.delta"),
    ("is_correction.delta_factor=-1", "is_correction.delta_factor"),
    ("is_correction.delta_steps=0.5", "is_correction.delta_steps"),
    ("is_correction.dump=1", "is_correction.dump"),
    ("is_correction.max_nonfinite_fraction=2", "is_correction.max_nonfinite_fraction"),
    ("is_correction.allow_truncated_support=1", "is_correction.allow_truncated_support"),
    ("is_correction.allow_truncated_support=maybe", "is_correction.allow_truncated_support"),
]

GOOD = [
    "",
    "+fp8=unified",
    "+fp8=rollout",
    "+is_correction=ais",
    f"+is_correction=ais {A}.strategy=fsdp",
    "+is_correction=none",
    "+fp8=unified +is_correction=ais trainer.v1.trainer_mode=colocate_async",
    "+is_correction=ais trainer.v1.trainer_mode=separate_async",
    "+fp8=unified +is_correction=none",
    "+fp8=unified +is_correction=ais",
    "+is_correction=ais +fp8=unified",
    "+fp8=rollout_per_tensor +is_correction=ais",
    "+fp8=rollout fp8.recipe.weights=channel fp8.recipe.activations=token fp8.weight_sync=bf16",
    f"+fp8=rollout_per_tensor {R}.tensor_model_parallel_size=2",
    "+fp8=rollout +is_correction=tis",
    f"+fp8=unified +is_correction=ais {A}.strategy=fsdp2",
    f"+fp8=unified +is_correction=ais {M}.external_lib=mine",
    f"+fp8=unified +is_correction=ais {RC}.rollout_rs=token_k1 {RC}.rollout_rs_threshold=0.5_2.0",
    f"+fp8=unified +is_correction=ais {RC}=null",
    f"+fp8=unified +is_correction=ais {R}.top_p=0.9 is_correction.allow_truncated_support=true",
    f"+fp8=unified +is_correction=ais {R}.tensor_model_parallel_size=2",
    f"+fp8=unified +is_correction=ais +{V}.hf_overrides.rope_theta=1e6 +{V}.max_logprobs=5",
    "+fp8=unified fp8.recipe.weight_block=[64,64] fp8.recipe.scale_format=pow2 fp8.recipe.exclude=['*.1.*']",
    "+fp8=unified fp8.weight_sync=bf16 fp8.sync_timeout=1.5 fp8.backend=reference fp8.recipe.backward=dequantized",
    "+fp8=unified algorithm.adv_estimator=gae critic.enable=false",
]


@pytest.mark.parametrize(("overrides", "key"), lines(BAD_VALUES))
def test_a_wrong_value_is_refused_by_name(tiny_model, overrides, key):
    """Both switches are on and one value is wrong: the run does not start, and the sentence names the key."""
    # A later override of a key wins, as on any command line.
    message = said(tiny_model, [*SWITCHES, *overrides])
    assert message is not None and key in message


@pytest.mark.parametrize("line", GOOD, ids=lambda line: line or "no switch")
def test_a_good_line_passes(tiny_model, line):
    """What the documentation offers passes verl's driver."""
    assert said(tiny_model, line.split()) is None


@pytest.mark.parametrize(
    "switches", ["+fp8=unified +is_correction=ais", "+is_correction=ais", "+fp8=unified", "+is_correction=mis"]
)
def test_an_existing_job_needs_only_the_switches(tiny_model, switches):
    """An FSDP2 GRPO job on verl's own ppo_trainer.yaml passes with the switches appended."""
    assert (
        said(tiny_model, [*JOB, *switches.split(), f"{R}.tensor_model_parallel_size=1"], config_name="ppo_trainer")
        is None
    )


@pytest.mark.parametrize("switches", [["+fp8=unified"], ["+is_correction=ais"], SWITCHES], ids=" ".join)
@pytest.mark.parametrize(
    "entry",
    ["fully_async_policy.fully_async_main.FullyAsyncTaskRunner", "one_step_off_policy.main_ppo.OneStepTaskRunner"],
)
def test_another_entry_point_is_refused(tiny_model, switches, entry):
    """verl's other asynchronous trainers share run_ppo, check nothing on the driver and never meet the stage."""
    from verl.trainer.main_ppo import run_ppo

    module, _, name = entry.rpartition(".")
    runner = getattr(importlib.import_module(f"verl.experimental.{module}"), name)
    message = refusal(run_ppo, compose(f"{M}.path={tiny_model}", *switches), task_runner_class=runner)
    assert message is not None and name in message and "trainer.v1.trainer_mode=colocate_async" in message


def test_judging_changes_nothing(tiny_model):
    """``judge`` leaves the configuration as it was, on a machine where the driver has keys to write."""
    config = compose(*SWITCHES, f"{M}.path={tiny_model}")
    before = OmegaConf.to_container(config, resolve=False)
    with assume(Hardware((9, 0), (13, 0), "2.20.2")):
        judgement = judge(config)
        assert judgement.refusals == () and fill.keys(judgement.run)
    assert OmegaConf.to_container(config, resolve=False) == before
    assert judgement.summary.fp8.mode == "unified"


def test_every_contradiction_is_in_the_judgement(tiny_model):
    """Several at once, of the switches' own values and of the job: each is there once, and a start raises the first."""
    wrong = {
        "is_correction.clip=-1": "is_correction.clip",
        f"{R}.name=sglang": f"{R}.name=sglang",
        f"{R}.dtype=float16": f"{R}.dtype=float16",
        f"{M}.lora_rank=8": f"{M}.lora_rank=8",
        f"{A}.fsdp_config.dtype=float16": f"{A}.fsdp_config.dtype=float16",
        f"{M}.path=/no/such/model": "/no/such/model",
    }
    config = compose(*SWITCHES, *wrong)
    found = [str(refusal) for refusal in judge(config).refusals]
    for named in wrong.values():
        assert len([sentence for sentence in found if named in sentence]) == 1, (named, found)
    assert len(found) == len(wrong)
    assert refusal(prepare, config) == found[0]


def test_a_switch_that_hydra_did_not_compose_is_all_there_is_to_say(tiny_model):
    """Without the group on Hydra's search path everything else is missing too: one refusal, not twenty."""
    config = compose(f"{M}.path={tiny_model}")
    OmegaConf.update(config, "fp8", "unified", force_add=True)
    (only,) = judge(config).refusals
    assert "the plain string 'unified'" in only.found


@pytest.fixture
def judged(monkeypatch):
    """The configurations that were judged, in order."""
    seen, judge = [], run.judge
    monkeypatch.setattr(run, "judge", lambda config: seen.append(config) or judge(config))
    return seen


def test_a_start_judges_once(tiny_model, judged):
    """The wrapper of validate_config asks and the actor's class asks again; so does ``check``, before both."""
    config = compose(*SWITCHES, f"{M}.path={tiny_model}")
    start(config)
    assert len(judged) == 1 and judged[0] is config
    validate(compose(*SWITCHES, f"{M}.path={tiny_model}"))
    assert len(judged) == 2


def test_another_start_is_judged_again(tiny_model, judged):
    """The same configuration once more in one process: checkpoints and dumps may be others by then."""
    config = compose(*SWITCHES, f"{M}.path={tiny_model}")
    start(config)
    start(config)
    assert len(judged) == 2


def test_another_configuration_is_judged_again(tiny_model, judged):
    """What was judged is known by its contents and its machine: a change of either, or a copy, is a new question."""
    config = compose(*SWITCHES, f"{M}.path={tiny_model}")
    validate_run(config)
    validate_run(config)
    assert len(judged) == 1
    with assume(Hardware((9, 0), (13, 0), "2.20.2")):
        validate_run(config)
    assert len(judged) == 2
    config.actor_rollout_ref.rollout.quantization = None
    assert f"{R}.quantization" in refusal(validate_run, config)
    assert f"{R}.quantization" in refusal(validate_run, config)  # a refusal is never remembered
    assert len(judged) == 4


def test_only_a_good_start_watches_for_leftovers(tiny_model, monkeypatch):
    """Judging starts nothing; the hook does, after the last rule."""
    started = []
    monkeypatch.setattr(leftovers, "watch", lambda: started.append(True))
    prepare(compose(*SWITCHES, f"{M}.path={tiny_model}"))
    assert refusal(start, compose(*SWITCHES, f"{M}.path={tiny_model}", f"{R}.dtype=float16"))
    assert started == []
    start(compose(*SWITCHES, f"{M}.path={tiny_model}"))
    assert started == [True]


def cli(arguments, **environment):
    """``python -m verl_fp8 check`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "verl_fp8", "check", *arguments],
        capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip


def quickstart(root, model):
    """The command line of the quickstart up to its switches."""
    return ["--config-dir", str(root / "recipes"), "--config-name", "quickstart", f"{M}.path={model}"]


@pytest.mark.slow
def test_a_recipe_without_the_package_is_refused_by_hydra(tmp_path):
    """Named in a defaults list a group that is not on the search path is an error, not a string."""
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, fp8: unified, _self_]\n")
    run = cli(
        ["--config-dir", str(tmp_path), "--config-name", "mine"], VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM=""
    )
    assert run.returncode == 2 and "fp8/unified" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "environment", "code", "text"),
    [
        (SWITCHES, {}, 0, "14 of 15 linear layers in FP8"),
        ([*SWITCHES, f"{R}.quantization=null"], {}, 2, f"{R}.quantization"),
        (["+fp8=unified"], {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_PLATFORM": ""}, 2, "the plain string 'unified'"),
    ],
    ids=["good", "contradiction", "the group silently absent"],
)
def test_the_check_command_says_the_same(root, tiny_model, overrides, environment, code, text):
    """``verl-fp8 check`` in its own process: exit code and sentence."""
    run = cli([*quickstart(root, tiny_model), *overrides], **environment)
    assert (run.returncode, text in run.stdout + run.stderr) == (code, True), run.stdout + run.stderr
    # What AIS will do besides its constants, where the line is good.
    assert code or "weights 128x128, activations 1x128" in run.stdout and "scope=batch, mode=apply" in run.stdout


@pytest.mark.slow
def test_main_ppo_itself_stops_before_ray(root, tiny_model):
    """``python -m verl.trainer.main_ppo`` with a contradiction ends with our sentence and has not started Ray."""
    line = [*quickstart(root, tiny_model), *SWITCHES, f"{R}.quantization=null"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *line, "hydra.run.dir=.", "hydra.output_subdir=null"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tiny_model)
    assert run.returncode != 0
    assert f"found: {R}.quantization=None" in run.stderr
    assert "ray init kwargs" not in run.stdout
