"""What each ``is_correction`` method but AIS means in verl's own settings, ``algorithm.rollout_correction``."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from verl_fp8.errors import ConfigError
from verl_fp8.switches.settings import CorrectionSettings
from verl_fp8.upstream.contract import require


def rollout_correction(settings: CorrectionSettings) -> dict[str, Any]:
    """verl's ``algorithm.rollout_correction`` for a method of verl's, only the keys that matter to it.

    Bounds are given the way verl takes them: ``low_high`` in one string. The values are those of the presets in
    verl/trainer/config/algorithm.py (RolloutCorrectionConfig) when ``is_correction.*`` is left alone.

    Raises:
        ConfigError: a key of the method is missing or no usable number; method is ``ais`` or ``none``, which are not
            verl's.
    """
    method, value = settings.method, _Numbers(settings)
    if method in ("tis", "tis_seq", "icepop", "mis"):
        threshold = value.bounds() if method == "icepop" else value("clip")
        weights = {
            "rollout_is": "token" if method in ("tis", "icepop") else "sequence",
            "rollout_is_threshold": threshold,
            "rollout_is_batch_normalize": value.flag("batch_normalize"),
        }
        rejection = {"rollout_rs": None}
        if method == "mis":
            rejection = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": value.bounds()}
        return {**weights, **rejection, "bypass_mode": False}
    if method == "geo_rs":
        return {
            "rollout_is": None,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": value.bounds(),
            "bypass_mode": False,
        }
    if method == "k3_rs":
        return {
            "rollout_is": None,
            "rollout_rs": "seq_mean_k3",
            "rollout_rs_threshold": value("max_k3"),
            "bypass_mode": False,
        }
    raise ConfigError(
        f"verl's settings for is_correction.method={method}", "a method that is not verl's", "use another method"
    )


class _Numbers:
    """The numeric parameters of a method, checked."""

    def __init__(self, settings: CorrectionSettings) -> None:
        self.settings = settings

    def __call__(self, key: str) -> float:
        name, value = f"is_correction.{key}", self.settings.parameters.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"{name}={value!r}", "not a positive number", f"set {name}, or select the group with +is_correction"
            )
        return value

    def bounds(self) -> str:
        low, high = self("low"), self("high")
        if low > high:
            raise ConfigError(
                f"is_correction.low={low}", f"is_correction.high={high}, below it", "set low to at most high"
            )
        return f"{low}_{high}"

    def flag(self, key: str) -> bool:
        value = self.settings.parameters.get(key)
        if not isinstance(value, bool):
            raise ConfigError(f"is_correction.{key}={value!r}", "not true or false", "set it to true or false")
        return value


def same_setting(found: Any, meant: Any) -> bool:
    """Whether verl reads two values of a rollout_correction key alike (``2``, ``2.0`` and ``"2.0"`` are one
    threshold)."""
    return found == meant or _threshold(found) == _threshold(meant) is not None


def _threshold(value: Any) -> tuple[float, ...] | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        return tuple(float(part) for part in str(value).split("_"))
    except ValueError:
        return None


def try_rollout_correction(node: Mapping[str, Any]) -> None:
    """Let verl itself judge the rejection sampling and thresholds of ``algorithm.rollout_correction``, on one token.

    Raises:
        ValueError, TypeError: verl's own, which would otherwise come with the first batch.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    require("correction.verls_methods")
    keys = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    zero = torch.zeros(1, 1)
    compute_rollout_correction_and_rejection_mask(zero, zero, zero + 1, **{k: node[k] for k in keys if k in node})
