"""What ``python -m verl.trainer.main_ppo`` does on the driver before Ray starts, for many lines in one process."""

import contextlib
import io
import warnings
from pathlib import Path

import hydra
import verl
from omegaconf import DictConfig
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from verl_fp8.tools.overrides import root_cause

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
VERL = Path(verl.__file__).parent / "trainer" / "config"

SWITCHES = ("+fp8=unified", "+is_correction=ais")


def compose(*overrides: str, config_name: str = "quickstart", config_dir: Path | None = None) -> DictConfig:
    """The composed configuration. Hydra's compose API takes half the time of hydra.main, which composes twice."""
    if config_dir is None:
        config_dir = RECIPES if config_name == "quickstart" else VERL
    with hydra.initialize_config_dir(str(config_dir), version_base=None):
        return hydra.compose(config_name, ["hydra.searchpath=[pkg://verl.trainer.config]", *overrides])


def start(config: DictConfig) -> None:
    """main_ppo's steps between Hydra and Ray (verl/trainer/main_ppo.py, main)."""
    auto_set_device(config)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


def refusal(act, *args, **kwargs) -> str | None:
    """The sentence of the exception that ``act`` ends with: ours if one is behind it, else the whole chain; or None."""
    try:
        act(*args, **kwargs)
    except Exception as error:
        cause = root_cause(error)
        if cause is not error:
            return str(cause)
        chain = []
        while error is not None:
            chain.append(str(error))
            error = error.__cause__
        return " | ".join(chain)
    return None
