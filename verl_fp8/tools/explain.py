"""``verl-fp8 explain [--shell | --json] <verl overrides>``: the raw settings that the switches expand to.

No list here says what the groups set. The command line is composed with the switches and without them, vLLM's
arguments are computed for both, and the two results are compared. Only the reasons are written down (:data:`REASONS`).
A test asks that every difference has one. ``--capability 9.0`` explains for another machine, as it does for ``check``.
"""

import contextlib
import itertools
import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fp8.rules import fill
from verl_fp8.rules.groups import GROUPS
from verl_fp8.switches.hardware import assume
from verl_fp8.tools.overrides import compose, machine, root_cause, validate

ABSENT = "(absent)"
_VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_SWITCH = re.compile(r"^[+~]*(fp8|is_correction)([@.=:]|$)")

# Pattern of a path -> why the switches set it. The first that matches counts.
REASONS: dict[str, str] = {
    "fp8.*": "the switch's own values; read by every process",
    "is_correction.*": "the switch's own values; read by the driver",
    "actor_rollout_ref.model._target_": "attaches the correction stage in the task runner, before the first step",
    "actor_rollout_ref.*.fsdp_config._target_": "an engine configuration that carries fp8; it selects the FP8 engine",
    "actor_rollout_ref.*.fsdp_config.fp8": "the one fp8 node, as actor and reference policy read it",
    "actor_rollout_ref.*.megatron._target_": "an engine configuration that carries fp8; it selects the FP8 engine",
    "actor_rollout_ref.*.megatron.fp8": "the one fp8 node, as actor and reference policy read it",
    "actor_rollout_ref.ref.megatron.override_transformer_config": "the actor's, by verl's own interpolation",
    "actor_rollout_ref.*.override_transformer_config.fp8_param": "parameters stay bf16, which both sides quantise",
    "actor_rollout_ref.*.override_transformer_config.fp8*": (
        "Megatron enters TransformerEngine's autocast in each decoder layer"
    ),
    "actor_rollout_ref.actor.optim.override_optimizer_config.fp8_recipe": (
        "the distributed optimizer is told the recipe"
    ),
    "actor_rollout_ref.rollout._target_": "computes vLLM's arguments from the same recipe and list of layers",
    "actor_rollout_ref.*._target_": "checks the whole configuration on the driver; chooses an FP8 actor's engine",
    "actor_rollout_ref.*.strategy": "the FP8 engine is verl's FSDP2 engine",
    "actor_rollout_ref.rollout.quantization": "vLLM loads its linear layers as block FP8",
    "actor_rollout_ref.rollout.calculate_log_probs": "the rollout's half of the ratio that is measured and corrected",
    "actor_rollout_ref.rollout.fp8_model.*": "the model whose layers are listed; a rollout has no model node",
    "actor_rollout_ref.rollout.fp8": "the one fp8 node, as the rollout reads it",
    f"{_VLLM}.worker_extension_cls": "loads the trainer's codes as they are, and compares every one of them",
    f"{_VLLM}.hf_overrides.quantization_config.ignored_layers": "the layers that stay in bf16: the trainer's list",
    f"{_VLLM}.hf_overrides.quantization_config.*": "vLLM's description of the recipe's format and blocks",
    f"{_VLLM}.hf_overrides.head_dtype": "fp8.lm_head=fp32: logits in float32, as the trainer's",
    f"{_VLLM}.additional_config.verl_fp8": "the fp8 node for vLLM's workers: kernel, quantiser and handshake read it",
    f"{_VLLM}.linear_backend": "fp8.rollout_kernel: vLLM would choose a kernel by shape, each with numerics of its own",
    f"{_VLLM}.moe_backend": "fp8.rollout_kernel, for experts",
    f"{_VLLM}.compilation_config.pass_config.*": "off: fusion would quantise before the rounding to bf16",
    **fill.REASONS,
    "algorithm.rollout_correction.*": "verl's own correction, as the method's preset has it",
    "te.*": "TransformerEngine's Float8BlockScaling, set on the instance: its defaults come from environment variables",
}


@dataclass(frozen=True)
class Setting:
    """One difference that the switches make.

    Attributes:
        path: dotted path in verl's configuration; under ``te.`` an attribute of TransformerEngine's recipe.
        old: its value without the switches, :data:`ABSENT` if there is none; interpolations resolved.
        new: with them.
        written: ``new`` as the groups write it, interpolations as they are.
        computed: filled in when the rollout's configuration is built, not by composing.
    """

    path: str
    old: Any
    new: Any
    written: Any
    computed: bool = False

    @property
    def reason(self) -> str | None:
        """Why, from :data:`REASONS`."""
        return next((why for pattern, why in REASONS.items() if fnmatchcase(self.path, pattern)), None)

    @property
    def owner(self) -> str:
        """Who reads it: ``verl``, ``vllm``, ``te``, or ``verl_fp8`` for what stock verl does not understand."""
        if self.path.startswith("te."):
            return "te"
        ours = {"fp8", "fp8_model", "is_correction", "verl_fp8"} & set(self.path.split("."))
        if ours or str(self.new).startswith("verl_fp8."):
            return "verl_fp8"
        return "vllm" if self.path.startswith(_VLLM) else "verl"


def without_switches(overrides: list[str]) -> list[str]:
    """The command line without the switches and their values. ``~group`` undoes a switch that a recipe has chosen."""
    rest = [o for o in overrides if not _SWITCH.match(o)]
    chosen = compose(rest)
    return rest + [f"~{group}" for group in GROUPS if group in chosen]


def explain(overrides: list[str]) -> list[Setting]:
    """Every difference that the switches make, in the order of verl's configuration.

    Args:
        overrides: what follows ``python -m verl.trainer.main_ppo``.

    Raises:
        Fp8Error: the run would be refused.
        ValueError: Hydra refused.
    """
    from verl.utils.device import auto_set_device

    config = compose(overrides)
    summary = validate(config)
    stock = compose(without_switches(overrides))
    auto_set_device(stock)
    # A leaf is what a group writes: ${fp8} is one setting, not a copy of every key below it.
    written, taken = (dict(_leaves(OmegaConf.to_container(c, resolve=False))) for c in (config, stock))
    old, new = (OmegaConf.to_container(c, resolve=True) for c in (stock, config))
    found = [Setting(p, _at(old, p), _at(new, p), value) for p, value in written.items() if _at(old, p) != _at(new, p)]
    found += [Setting(p, _at(old, p), ABSENT, ABSENT) for p in taken if _at(new, p) == ABSENT]
    if summary.fp8 is not None:
        found += _computed(config)
        # In Megatron the environment above says it.
        if summary.backend == "te" and not summary.fp8.megatron:
            from verl_fp8.trainer.te import te_settings

            found += [
                Setting(f"te.{k}", ABSENT, v, v, computed=True) for k, v in te_settings(summary.fp8.recipe).items()
            ]
    return found


def _computed(config: DictConfig) -> list[Setting]:
    """What Fp8RolloutConfig adds to vLLM's arguments in the processes that build it."""
    from verl_fp8.rollout.arguments import fp8_arguments, plain
    from verl_fp8.switches.settings import NODE

    rollout = config.actor_rollout_ref.rollout
    given = plain(rollout.engine_kwargs.vllm)
    # The whole fp8 node goes along; it has been listed.
    filled = fp8_arguments(rollout.fp8, rollout.fp8_model, given)
    filled["additional_config"] = {**filled["additional_config"], NODE: "${fp8}"}
    return [
        Setting(f"{_VLLM}.{path}", _at(given, path), value, value, computed=True)
        for path, value in _leaves(filled)
        if _at(given, path) != value
    ]


def _at(node: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ABSENT
        node = node[part]
    return node


def _leaves(node: Mapping, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, here)
        else:
            yield here, value


def shell(settings: list[Setting]) -> str:
    """A bash fragment of Hydra overrides, one a line, that set by hand what the switches set.

    It holds two arrays. ``STOCK`` alone runs on verl without this package. Together with ``VERL_FP8`` it composes what
    the switches compose.
    """
    stock = [s for s in settings if s.owner in ("verl", "vllm") and s.new != ABSENT]
    ours = [s for s in settings if s.owner == "verl_fp8" and not s.computed]
    lines = ["# verl's and vLLM's own keys: any verl 0.9 takes them", "STOCK=("]
    lines += [f"  {_quoted(_override(s, s.new))}" for s in stock]
    lines += [")"]
    if ours:
        lines += ["# what stock verl has not: these need verl_fp8 installed on every node", "VERL_FP8=("]
        lines += [f"  {_quoted(_override(s, s.written))}" for s in ours]
        lines += [")"]
    removed = [s.path for s in settings if s.new == ABSENT]
    lines += [f"# and remove {path}" for path in removed]
    arrays = '"${STOCK[@]}"' + (' "${VERL_FP8[@]}"' if ours else "")
    return "\n".join([*lines, f"# python -m verl.trainer.main_ppo <your overrides> {arrays}"])


def _quoted(argument: str) -> str:
    """For bash; double quotes around single ones, which are Hydra's and would take five characters each."""
    return '"' + re.sub(r'([\\"$`])', r"\\\1", argument) + '"' if "'" in argument else shlex.quote(argument)


def _override(setting: Setting, value: Any) -> str:
    return f"{'+' if setting.old == ABSENT else ''}{setting.path}={hydra_value(value)}"


def hydra_value(value: Any) -> str:
    """A plain value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(hydra_value(v) for v in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{k}:{hydra_value(v)}' for k, v in value.items())}}}"
    # A digit first could be read as a number (0.5_5.0), and true, null and the like as what they say.
    plain = re.fullmatch(r"[A-Za-z_/][\w./:-]*", value) and value.lower() not in ("true", "false", "null", "nan", "inf")
    # Hydra takes a backslash as itself except before a quote, the closing one included.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return value if plain else f"'{escaped}'"


def explain_command(arguments: list[str]) -> int:
    """Print a list, ``--shell`` or ``--json``; exit code 0, or 2 and one sentence on stderr if the run is refused."""
    forms = {"--shell", "--json"} & set(arguments)
    try:
        assumed, overrides = machine([a for a in arguments if a not in forms])
        with warnings.catch_warnings(), contextlib.nullcontext() if assumed is None else assume(assumed):
            warnings.simplefilter("ignore")  # verl's, about engines that are not installed
            settings = explain(overrides)
    except Exception as error:  # whatever refuses the run is the answer
        print(f"refused: {root_cause(error)}", file=sys.stderr)
        return 2
    if not settings:
        print("stock verl; neither +fp8 nor +is_correction is selected")
    elif "--json" in forms:
        rows = [{"path": s.path, "owner": s.owner, "old": s.old, "new": s.new, "reason": s.reason} for s in settings]
        print(json.dumps(rows, indent=1))
    elif "--shell" in forms:
        print(shell(settings))
    else:
        _print(settings)
    return 0


def _print(settings: list[Setting]) -> None:
    for reason, same in itertools.groupby(settings, key=lambda s: s.reason):
        print(f"# {reason}")
        for s in same:
            # The groups write ${fp8} in four places; its values are listed once, under fp8 itself.
            print(f"  [{s.owner}] {s.path}: {_short(s.old)} -> {_short(s.written if s.owner == 'verl_fp8' else s.new)}")
    print(f"{len(settings)} settings. --shell prints them as overrides, --json as data.")


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"[{value[0]}, ... {len(value)} names]"
    return value if value == ABSENT else hydra_value(value)
