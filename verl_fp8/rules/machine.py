"""What this machine can run of the recipe, and whether the workers' environment leaves it so.

Kernels are chosen in :mod:`verl_fp8.switches.hardware`, the variables that hold them in place in
:class:`verl_fp8.rules.asked.Run`. Here both are judged; :mod:`verl_fp8.rules.fill` writes the variables.
"""

from collections.abc import Iterable, Iterator

from verl_fp8.rules.asked import ENVIRONMENT, Run, Variable
from verl_fp8.rules.megatron import machine_can_train
from verl_fp8.rules.refuse import Refusal, caught, get
from verl_fp8.switches.hardware import refuse_coarse_scales


def megatron_environment_is_free(run: Run) -> Iterator[Refusal]:
    """Megatron: the user's own environment for the workers says nothing else than the recipe."""
    yield from _free(run, run.megatron_variables)


def scales_have_a_kernel(run: Run) -> Iterator[Refusal]:
    """One scale a tensor, channel or token is for the CPU only."""
    if not run.on_cpu and run.fp8.recipe.weights != "block":
        yield from caught(refuse_coarse_scales, run.fp8.recipe, f"fp8.mode={run.fp8.mode}")


def kernels_are_there(run: Run) -> Iterator[Refusal]:
    """The trainer's backend and vLLM's kernel exist on this machine."""
    yield from caught(lambda: run.backend)
    yield from caught(lambda: run.kernel)


def vllm_environment_is_free(run: Run) -> Iterator[Refusal]:
    """The user's own environment for the workers chooses no other kernels for vLLM."""
    yield from _free(run, run.vllm_variables)


def _free(run: Run, variables: Iterable[Variable]) -> Iterator[Refusal]:
    for variable in variables:
        path = f"{ENVIRONMENT}.{variable.name}"
        found = get(run.config, path)
        if found is not None and str(found) != variable.value:
            needs = f"{variable.name} unset" if variable.value is None else f"{variable.name}={variable.value}"
            yield Refusal(f"{variable.asked}, which needs {needs}", f"{path}={found}", f"remove {path}")


RULES = (
    machine_can_train,
    megatron_environment_is_free,
    scales_have_a_kernel,
    kernels_are_there,
    vllm_environment_is_free,
)
