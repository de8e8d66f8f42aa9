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

from verl_fp8.errors import ConfigError
from verl_fp8.layers.shapes import MODEL_KEYS
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


@functools.cache
def targets_of(file: str) -> dict[str, str]:
    """Dotted path -> ``_target_``, for every class of ours that ``verl_fp8/conf/<file>.yaml`` puts into verl's configuration."""
    tree = OmegaConf.to_container(OmegaConf.load(resources.files("verl_fp8.conf") / f"{file}.yaml"), resolve=False)
    return {path: value for path, value in sorted(_walk(tree)) if path.endswith("._target_")}


def check_groups(config: DictConfig) -> None:
    """Refuse a switch at a place nothing reads (``+actor_rollout_ref.fp8=unified``, ``+is_corection=ais``), and a group
    without its choice (``+fp8=wiring``).

    Other people's keys of the same name stay theirs (Megatron has ``override_transformer_config.fp8``): only a value
    that is one of ours counts.

    Raises:
        ConfigError: names the key.
    """
    for group, choice in (("fp8", "mode"), ("is_correction", "method")):
        node = config.get(group)
        if isinstance(node, DictConfig) and node.get(choice) is None:
            raise ConfigError(
                f"the group {group}",
                f"no {group}.{choice}: +{group}=wiring alone, or ~{group}.{choice}",
                f"select one with +{group}=<{'|'.join(GROUPS[group])}>",
            )
    for path, value in _walk(OmegaConf.to_container(config, resolve=False)):
        parent, _, key = path.rpartition(".")
        if path in _PLACES:
            continue
        near = [key] if parent else difflib.get_close_matches(key.lower(), GROUPS, n=1, cutoff=0.85)
        group = near[0] if near and near[0] in GROUPS else None
        if group is not None and _ours(group, value):
            raise ConfigError(
                f"{path}={value}",
                f"a key that nothing reads; the group is {group}, at the top level",
                f"write +{group}=<choice>, with one of {', '.join(GROUPS[group])}",
            )


def _ours(group: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("mode" if group == "fp8" else "method") in GROUPS[group] or "recipe" in value
    return value in GROUPS[group]


def _walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        here = f"{path}.{key}" if path else str(key)
        yield here, value
        if isinstance(value, Mapping):
            yield from _walk(value, here)


def check_nodes(config: DictConfig, engine: str) -> None:
    """Refuse places that hold another copy of ``fp8``, or of the model's keys, than the one everybody sets.

    Args:
        engine: the engine's node under actor and ref, ``fsdp_config`` or ``megatron``.

    Raises:
        ConfigError: names the key.
    """
    for place in (f"actor.{engine}", f"ref.{engine}", "rollout"):
        _same(config, f"actor_rollout_ref.{place}.fp8", "fp8", config.fp8)
    model = config.actor_rollout_ref.model
    for key in MODEL_KEYS:
        _same(config, f"actor_rollout_ref.rollout.fp8_model.{key}", f"actor_rollout_ref.model.{key}", model.get(key))


def _same(config: DictConfig, path: str, owner: str, wanted: Any) -> None:
    found, wanted, override = _plain(OmegaConf.select(config, path)), _plain(wanted), path
    while isinstance(found, Mapping) and isinstance(wanted, Mapping) and found != wanted:
        key = next(k for k in {**wanted, **found} if k not in found or k not in wanted or found[k] != wanted[k])
        path, owner, found, wanted = f"{path}.{key}", f"{owner}.{key}", found.get(key), wanted.get(key)
    if found != wanted:
        raise ConfigError(
            f"{owner} to hold for trainer and rollout alike",
            f"{path}={found} beside {owner}={wanted}",
            f"remove the override of {override}; set {owner} instead",
        )


def check_fields(config: DictConfig) -> None:
    """Refuse keys that verl's dataclasses would refuse too, but only in a worker, after Ray has started.

    Raises:
        ConfigError: names the key.
    """
    from verl.workers.config import HFModelConfig, RolloutConfig

    # Ours (verl_fp8/conf/fp8/wiring.yaml) are verl's with two nodes more in the rollout's.
    for role, cls, more in (("model", HFModelConfig, set()), ("rollout", RolloutConfig, {"fp8", "fp8_model"})):
        known = {f.name for f in dataclasses.fields(cls)} | {"_target_"} | more
        for key in config.actor_rollout_ref[role]:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise ConfigError(
                    f"actor_rollout_ref.{role}.{key}={config.actor_rollout_ref[role][key]}",
                    f"no such key in verl's {role} configuration",
                    f"remove it{f', or write {near[0]}' if near else ''}",
                )


def check_vllm_arguments(config: DictConfig, asked: str) -> None:
    """Refuse arguments of vLLM (``engine_kwargs.vllm``, which verl merges last) that the rules would not recognise.

    Raises:
        ConfigError: names the key.
    """
    arguments = OmegaConf.select(config, _VLLM) or {}
    for name, value in arguments.items():
        plain = str(name).replace("-", "_").split(".")[0].rstrip("+")
        means = plain if plain in _JUDGED else next((j for j in _JUDGED if j.startswith(plain)), None)
        if means is not None and name != means:
            raise ConfigError(
                asked, f"{_VLLM}.{name}={value}, which vLLM reads as {means}", f"write it {_VLLM}.{means}"
            )
        if name in _MAPPINGS and value is not None and not isinstance(value, DictConfig):
            raise ConfigError(
                asked, f"{_VLLM}.{name}={value!r}, which is no mapping", f"write {_VLLM}.{name}.<key>=<value>"
            )
    if NODE in (arguments.get("additional_config") or {}):
        raise ConfigError(asked, f"{_VLLM}.additional_config.{NODE}, which the group fp8 fills", "remove it; set fp8.*")
    own = (
        ("dtype", "actor_rollout_ref.rollout.dtype"),
        ("tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("logprobs_mode", "actor_rollout_ref.rollout.logprobs_mode"),
    )
    for name, owner in own:
        value = arguments.get(name)
        if value is not None and value != OmegaConf.select(config, owner):
            raise ConfigError(
                asked, f"{_VLLM}.{name}={value} beside {owner}={OmegaConf.select(config, owner)}", f"set {owner} only"
            )
    if arguments.get("enable_lora"):
        raise ConfigError(asked, f"{_VLLM}.enable_lora={arguments.enable_lora}", f"remove {_VLLM}.enable_lora")


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
