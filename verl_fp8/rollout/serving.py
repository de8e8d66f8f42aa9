"""Which FP8 run this vLLM process serves, and whether its environment is what the kernels need."""

import os

from verl_fp8.errors import ContractError
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.rollout.environment import environment
from verl_fp8.switches.hardware import probe
from verl_fp8.switches.settings import Fp8Settings, settings_of

DEQUANTIZED = "_verl_fp8_dequantized"


def settings_served() -> Fp8Settings | None:
    """The fp8 node of the vLLM that is being built, None for one that is not ours."""
    from vllm.config import get_current_vllm_config_or_none

    settings = settings_of(get_current_vllm_config_or_none())
    if settings is not None:
        _check_environment(settings)
        SERVED.add(settings)
    return settings


SERVED: set[Fp8Settings] = set()  # of this process; forwards and refits run outside vLLM's configuration context


def serve(settings: Fp8Settings) -> None:
    """Called by the worker before it builds the model: this process runs FP8 layers of these settings.

    Sets the variables of :func:`~verl_fp8.rollout.environment.environment` that are not set, as they are where the
    driver has no GPU to resolve ``auto`` by; vLLM reads them when it builds the layers.

    Raises:
        ContractError: one of them has another value.
    """
    for name, value in environment(settings, probe()).items():
        os.environ.setdefault(name, value)
    _check_environment(settings)
    SERVED.add(settings)


def serving() -> Recipe | None:
    """The recipe of the FP8 model this process runs; None in a vLLM that is not ours.

    Raises:
        ContractError: there are two.
    """
    recipes = {settings.recipe for settings in SERVED}
    if len(recipes) > 1:
        raise ContractError(
            "one FP8 recipe in a vLLM process", f"{len(recipes)}", "start each vLLM in a process of its own"
        )
    return next(iter(recipes), None)


def _check_environment(settings: Fp8Settings) -> None:
    # What has no argument of its own.
    name = "VLLM_USE_DEEP_GEMM_E8M0"
    wanted = environment(settings, probe()).get(name)
    found = os.environ.get(name, "1")  # vllm/envs.py
    if wanted is not None and found != wanted:
        raise ContractError(
            f"{name}={wanted} for {settings.recipe.scale_format} scales with fp8.rollout_kernel=deep_gemm",
            f"{name}={found} in vLLM's process",
            f"set +ray_kwargs.ray_init.runtime_env.env_vars.{name}={wanted}",
        )
