"""A run with the group ``is_correction`` as the driver sees it, and a batch of log-probs."""

import copy
import functools

import pytest
import torch
from omegaconf import OmegaConf

from verl_fp8.errors import ConfigError
from verl_fp8.rules.run import validate_run
from verl_fp8.switches.settings import CorrectionSettings
from verl_fp8.tools.overrides import compose

# What a run on any machine sets; the model is not looked at without +fp8.
BASE = ["actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.rollout.name=vllm", "algorithm.adv_estimator=grpo"]
composed = functools.cache(lambda group: compose([*BASE, group]))


def configured(group, *overrides):
    """A group composed through Hydra as verl's entry point does, then overrides, which Hydra too applies last."""
    config = copy.deepcopy(composed(group))
    for override in overrides:
        key, value = override.lstrip("+").split("=", 1)
        OmegaConf.update(
            config, key, OmegaConf.from_dotlist([f"value={value}"]).value, force_add=override.startswith("+")
        )
    return config


def run(group, *overrides):
    """The configuration, and what the driver's checks return for it."""
    config = configured(group, *overrides)
    return config, validate_run(config)


def refusal(group, *overrides):
    """The sentence the driver refuses with."""
    config = configured(group, *overrides)
    with pytest.raises(ConfigError) as caught:
        validate_run(config)
    return str(caught.value)


def batch(rows=8, length=16, seed=0, spread=0.05):
    """A padded batch: trainer's and rollout's log-probs, advantages, mask."""
    g = torch.Generator().manual_seed(seed)
    train = -torch.rand(rows, length, generator=g) * 3
    rollout = train + spread * torch.randn(rows, length, generator=g)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=g)
    return train, rollout, torch.randn(rows, 1, generator=g).expand(rows, length) * mask, mask


def settings(**node):
    """Parsed AIS settings."""
    return CorrectionSettings.parse({"method": "ais", **node})
