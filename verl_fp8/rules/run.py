"""Composing a run on the driver, before Ray starts, in three steps: read what was asked, judge it, fill the keys.

* Read (:func:`verl_fp8.rules.asked.read`): the groups ``fp8`` and ``is_correction`` are parsed.
* Judge (:func:`judge`): every rule looks at the run and says what contradicts it. A rule reads only.
* Fill (:mod:`verl_fp8.rules.fill`): the keys that the driver owns are written into the configuration.

:func:`prepare` does the three. :func:`validate_run` does them once a start: verl's own ``validate_config`` reaches it,
through our wrapper and again through the actor's configuration class, and so does ``verl-fp8 check``.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fp8.errors import ConfigError, Fp8Error
from verl_fp8.rules import correction, fill, groups, job, machine, megatron, model
from verl_fp8.rules.asked import Run, read
from verl_fp8.rules.refuse import Refusal, caught, get
from verl_fp8.rules.resume import the_checkpoint_goes_on
from verl_fp8.switches.hardware import Hardware, probe
from verl_fp8.switches.settings import CorrectionSettings, Fp8Settings
from verl_fp8.upstream.contract import require_versions

Rule = Callable[[Run], Iterator[Refusal]]


@dataclass(frozen=True)
class RunSummary:
    """What a valid configuration will do: the parsed groups, the layers, and what ``auto`` is on this machine.

    ``backend`` and ``kernel`` are None where this machine is not the one that will train (a driver without a GPU).
    """

    fp8: Fp8Settings | None
    correction: CorrectionSettings | None
    converted: tuple[str, ...] = ()
    kept: dict[str, str] | None = None
    backend: str | None = None
    kernel: str | None = None


@dataclass(frozen=True)
class Judgement:
    """A run and everything that is wrong with it.

    Attributes:
        run: what was asked, and the facts found about it.
        refusals: the first is the one that a start raises. Each holds by itself: none is the consequence of another.
    """

    run: Run
    refusals: tuple[Refusal, ...]

    @property
    def summary(self) -> RunSummary:
        """What the run will do; of a run that nothing refuses."""
        run = self.run
        if run.fp8 is None:
            return RunSummary(None, run.correction)
        layers = run.layers
        return RunSummary(run.fp8, run.correction, layers.converted, dict(layers.kept), run.backend, run.kernel)


def the_switches_can_be_read(run: Run) -> Iterator[Refusal]:
    """Each group parses: known keys, of the right types."""
    yield from run.unreadable


def the_versions_are_known(run: Run) -> Iterator[Refusal]:
    """verl, and for FP8 vLLM, in a version that was tried."""
    yield from caught(require_versions, vllm=get(run.config, "fp8") is not None)


def rules(run: Run) -> Iterator[Rule]:
    """The rules that apply, in the order in which a start asks them."""
    yield from (groups.groups_are_chosen, groups.groups_stand_where_read, the_switches_can_be_read)
    if not run.asked or not run.composed:
        return
    yield from (the_versions_are_known, *job.SHARED, groups.fields_are_verls, groups.vllm_arguments_are_recognised)
    if run.correction is not None:
        yield from correction.RULES
    if run.fp8 is not None:
        yield from job.ENGINE
        if run.fp8.megatron:
            yield from megatron.ENGINE
        yield from (groups.nodes_are_the_same, job.the_rollout_serves_the_recipe)
        yield from (*machine.RULES, the_checkpoint_goes_on, *model.RULES)


def collect(run: Run, asked: Iterable[Rule]) -> tuple[Refusal, ...]:
    """All refusals, each once.

    A rule may need a fact that another has found to be missing. It then ends with that refusal again, or stumbles over
    what was refused before it; either way it has nothing of its own to say.
    """
    found: list[Refusal] = []
    for rule in asked:
        try:
            for refusal in rule(run):
                if refusal not in found:
                    found.append(refusal)
        except Fp8Error as error:
            if (refusal := Refusal.of(error)) not in found:
                found.append(refusal)
        except Exception:
            if not found:
                raise
    return tuple(found)


def judge(config: DictConfig) -> Judgement:
    """Read and judge a composed verl configuration. Changes nothing and starts nothing."""
    run = read(config)
    return Judgement(run, collect(run, rules(run)))


def prepare(config: DictConfig) -> RunSummary:
    """Read and judge a composed verl configuration, then write the keys of the driver into it.

    Raises:
        ConfigError: the first contradiction found.
        ContractError: an unsupported version of verl or vLLM.
        DataError: the checkpoint to resume from is cut.
    """
    judgement = judge(config)
    if judgement.refusals:
        raise judgement.refusals[0].error()
    fill.write(config, fill.keys(judgement.run))
    return judgement.summary


@dataclass(frozen=True)
class _Prepared:
    """The last configuration that this process has prepared, as it was left, and for which machine."""

    config: weakref.ref
    contents: str
    machine: Hardware
    summary: RunSummary


_last: _Prepared | None = None


def validate_run(config: DictConfig) -> RunSummary:
    """:func:`prepare`, unless it was the last to be asked in this process and nothing has changed since.

    A start comes here twice with one configuration. The summary is kept in the process, never in the configuration.

    Raises:
        Fp8Error: as :func:`prepare`.
    """
    global _last
    last = _last
    if last is not None and last.config() is config and (last.contents, last.machine) == (_contents(config), probe()):
        return last.summary
    summary = prepare(config)
    _last = _Prepared(weakref.ref(config), _contents(config), probe(), summary)
    return summary


def conclude_start(config: DictConfig) -> RunSummary:
    """:func:`validate_run` for the last time in a start. Then the summary is forgotten.

    Another start of the same configuration in this process is judged anew: it may find other checkpoints and dumps.

    Raises:
        Fp8Error: as :func:`prepare`.
    """
    global _last
    summary, _last = validate_run(config), None
    return summary


def _contents(config: DictConfig) -> str:
    # As text: to `==`, 1 and true are one value.
    return repr(OmegaConf.to_container(config, resolve=False))


def validate_entry(config: DictConfig, task_runner: Any) -> None:
    """:func:`validate_run` for a configuration that an entry point hands to verl's ``run_ppo``.

    Args:
        task_runner: the Ray actor class that will train.

    Raises:
        ConfigError: a switch, and another task runner than verl.trainer.main_ppo's, which brings a trainer of its own.
    """
    from verl.trainer.main_ppo import TaskRunnerV1

    switches = [f"+{group}" for group in groups.GROUPS if get(config, group) is not None]
    if switches and task_runner is not TaskRunnerV1:
        name = getattr(getattr(task_runner, "__ray_metadata__", None), "class_name", str(task_runner))
        raise ConfigError(
            " ".join(switches),
            f"the task runner {name}, whose trainer the switches do not reach",
            "start python -m verl.trainer.main_ppo; trainer.v1.trainer_mode=colocate_async trains asynchronously",
        )
    validate_run(config)
