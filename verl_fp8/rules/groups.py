"""Whether the groups ``fp8`` and ``is_correction`` act: every place they set must still hold what they set there.

Hydra lets a value on the command line win over a group, appends an unknown group as a plain string, and takes keys
nobody reads. Each of these leaves a run that trains without what was asked for, so each is looked for.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fp8.layers.shapes import MODEL_KEYS
from verl_fp8.rules.asked import GROUP_CHOICES, Run, is_group
from verl_fp8.rules.refuse import Refusal
from verl_fp8.switches.settings import CHOICES, METHODS, NODE

GROUPS = {"fp8": CHOICES, "is_correction": METHODS}

# Where the groups put their nodes; everywhere else nothing reads them.
_PLACES = {
    "fp8",
    "is_correction",
    *(f"actor_rollout_ref.{role}.{engine}.fp8" for role in ("actor", "ref") for engine in ("fsdp_config", "megatron")),
    "actor_rollout_ref.rollout.fp8",
}

# Arguments of vLLM that the rules judge. vLLM also takes them with dashes, abbreviated (argparse) and as `name.key`.
_JUDGED = (
    "additional_config",
    "compilation_config",
    "dtype",
    "enable_lora",
    "hf_overrides",
    "kernel_config",
    "kv_cache_dtype",
    "linear_backend",
    "logprobs_mode",
    "moe_backend",
    "override_generation_config",
    "quantization",
    "tensor_parallel_size",
    "worker_extension_cls",
)
_MAPPINGS = ("additional_config", "hf_overrides", "kernel_config", "override_generation_config")
_VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
# Arguments of vLLM that verl has a key of its own for.
_OWNED = (
    ("dtype", "actor_rollout_ref.rollout.dtype"),
    ("tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
    ("logprobs_mode", "actor_rollout_ref.rollout.logprobs_mode"),
)


@functools.cache
def targets_of(file: str) -> dict[str, str]:
    """Dotted path -> ``_target_``, for every class of ours that ``verl_fp8/conf/<file>.yaml`` names."""
    tree = OmegaConf.to_container(OmegaConf.load(resources.files("verl_fp8.conf") / f"{file}.yaml"), resolve=False)
    return {path: value for path, value in sorted(_walk(tree)) if path.endswith("._target_")}


def groups_are_chosen(run: Run) -> Iterator[Refusal]:
    """A group has its choice; ``+fp8=wiring`` alone has none."""
    for group, choice in GROUP_CHOICES.items():
        node = run.config.get(group)
        if is_group(node) and node.get(choice) is None:
            found = f"no {group}.{choice}: +{group}=wiring alone, or ~{group}.{choice}"
            yield Refusal(f"the group {group}", found, f"select one with +{group}=<{'|'.join(GROUPS[group])}>")


def groups_stand_where_read(run: Run) -> Iterator[Refusal]:
    """No switch stands where nothing reads it: ``+actor_rollout_ref.fp8=unified``, ``+is_corection=ais``.

    Other people's keys of the same name stay theirs (Megatron has ``override_transformer_config.fp8``): only a value
    that is one of ours counts.
    """
    for path, value in _walk(OmegaConf.to_container(run.config, resolve=False)):
        parent, _, key = path.rpartition(".")
        if path in _PLACES:
            continue
        near = [key] if parent else difflib.get_close_matches(key.lower(), GROUPS, n=1, cutoff=0.85)
        group = near[0] if near and near[0] in GROUPS else None
        if group is not None and _ours(group, value):
            found = f"a key that nothing reads; the group is {group}, at the top level"
            fix = f"write +{group}=<choice>, with one of {', '.join(GROUPS[group])}"
            yield Refusal(f"{path}={value}", found, fix)


def _ours(group: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get(GROUP_CHOICES[group]) in GROUPS[group] or "recipe" in value
    return value in GROUPS[group]


def _walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        here = f"{path}.{key}" if path else str(key)
        yield here, value
        if isinstance(value, Mapping):
            yield from _walk(value, here)


def nodes_are_the_same(run: Run) -> Iterator[Refusal]:
    """Every copy of ``fp8``, and of the model's keys, is what everybody else reads."""
    engine = "megatron" if run.fp8.megatron else "fsdp_config"
    for place in (f"actor.{engine}", f"ref.{engine}", "rollout"):
        yield from _same(run.config, f"actor_rollout_ref.{place}.fp8", "fp8", run.config.fp8)
    model = run.config.actor_rollout_ref.model
    for key in MODEL_KEYS:
        path, owner = f"actor_rollout_ref.rollout.fp8_model.{key}", f"actor_rollout_ref.model.{key}"
        yield from _same(run.config, path, owner, model.get(key))


def _same(config: DictConfig, path: str, owner: str, wanted: Any) -> Iterator[Refusal]:
    found, wanted, override = _plain(OmegaConf.select(config, path)), _plain(wanted), path
    while isinstance(found, Mapping) and isinstance(wanted, Mapping) and found != wanted:
        key = next(k for k in {**wanted, **found} if k not in found or k not in wanted or found[k] != wanted[k])
        path, owner, found, wanted = f"{path}.{key}", f"{owner}.{key}", found.get(key), wanted.get(key)
    if found != wanted:
        yield Refusal(
            f"{owner} to hold for trainer and rollout alike",
            f"{path}={found} beside {owner}={wanted}",
            f"remove the override of {override}; set {owner} instead",
        )


def fields_are_verls(run: Run) -> Iterator[Refusal]:
    """verl's dataclasses have the keys. They would refuse one too, but in a worker, after Ray has started."""
    from verl.workers.config import HFModelConfig, RolloutConfig

    # Ours (verl_fp8/conf/fp8/wiring.yaml) are verl's with two nodes more in the rollout's.
    for role, cls, more in (("model", HFModelConfig, set()), ("rollout", RolloutConfig, {"fp8", "fp8_model"})):
        known = {f.name for f in dataclasses.fields(cls)} | {"_target_"} | more
        node = run.config.actor_rollout_ref[role]
        for key in node:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                found = f"no such key in verl's {role} configuration"
                fix = f"remove it{f', or write {near[0]}' if near else ''}"
                yield Refusal(f"actor_rollout_ref.{role}.{key}={node[key]}", found, fix)


def vllm_arguments_are_recognised(run: Run) -> Iterator[Refusal]:
    """The arguments of vLLM (``engine_kwargs.vllm``, which verl merges last) that the rules judge go by one name."""
    arguments, asked = OmegaConf.select(run.config, _VLLM) or {}, run.asked
    for name, value in arguments.items():
        plain = str(name).replace("-", "_").split(".")[0].rstrip("+")
        means = plain if plain in _JUDGED else next((j for j in _JUDGED if j.startswith(plain)), None)
        if means is not None and name != means:
            found = f"{_VLLM}.{name}={value}, which vLLM reads as {means}"
            yield Refusal(asked, found, f"write it {_VLLM}.{means}")
        if name in _MAPPINGS and value is not None and not isinstance(value, DictConfig):
            found = f"{_VLLM}.{name}={value!r}, which is no mapping"
            yield Refusal(asked, found, f"write {_VLLM}.{name}.<key>=<value>")
    if NODE in (arguments.get("additional_config") or {}):
        found = f"{_VLLM}.additional_config.{NODE}, which the group fp8 fills"
        yield Refusal(asked, found, "remove it; set fp8.*")
    for name, owner in _OWNED:
        value, owned = arguments.get(name), OmegaConf.select(run.config, owner)
        if value is not None and value != owned:
            yield Refusal(asked, f"{_VLLM}.{name}={value} beside {owner}={owned}", f"set {owner} only")
    if arguments.get("enable_lora"):
        yield Refusal(asked, f"{_VLLM}.enable_lora={arguments.enable_lora}", f"remove {_VLLM}.enable_lora")


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
