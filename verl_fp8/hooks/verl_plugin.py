"""Entry point of the ``verl.plugins`` group. It makes two things known, each when verl first needs it:

* to Hydra, the groups ``fp8`` and ``is_correction``;
* to verl's driver, the rules for them.

verl imports this module in every process, right after its own package (verl/__init__.py). It logs what the module
raises at DEBUG level and goes on. So nothing here may fail, and nothing heavy may be imported: no torch, no
verl.workers.
"""

import wrapt

from verl_fp8.upstream import patched
from verl_fp8.upstream.platform import cpu_platform


@wrapt.when_imported("hydra.core.plugins")
def _add_search_path(module) -> None:
    # Only once somebody imports Hydra. Its import costs as much again as everything else that this package adds.
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Fp8SearchPath(SearchPathPlugin):
        """Puts ``verl_fp8/conf`` on the search path of every Hydra application of the process."""

        def manipulate_search_path(self, search_path) -> None:
            search_path.append("verl_fp8", "pkg://verl_fp8.conf")

    module.Plugins.instance().register(Fp8SearchPath)


def _judge_then_validate(wrapped, instance, args, kwargs):
    from verl_fp8.rules.run import validate_run

    validate_run(kwargs["config"] if "config" in kwargs else args[0])
    return wrapped(*args, **kwargs)


@wrapt.when_imported("verl.utils.config")
def _judge_on_the_driver(module) -> None:
    # Our configuration classes ask for the rules too (verl_fp8/hooks/targets.py). But an override may have put verl's
    # own classes back, and so may a recipe that names the groups before ppo_trainer. Then nobody else would look, and
    # the run would train without what was asked for.
    if not patched.carries(module, "validate_config"):
        wrapt.wrap_function_wrapper(module, "validate_config", _judge_then_validate)


def _judge_then_run(wrapped, instance, args, kwargs):
    from verl_fp8.rules.run import validate_entry

    config = kwargs["config"] if "config" in kwargs else args[0]
    validate_entry(config, kwargs["task_runner_class"] if "task_runner_class" in kwargs else args[1])
    return wrapped(*args, **kwargs)


@wrapt.when_imported("verl.trainer.main_ppo")
def _judge_other_entry_points(module) -> None:
    # `python -m verl.trainer.main_ppo` runs the module and does not import it. Other entry points do import it, for
    # run_ppo (one_step_off_policy, fully_async_policy, recipes). They validate nothing on the driver, and bring
    # trainers that the stage is not attached to.
    wrapt.wrap_function_wrapper(module, "run_ppo", _judge_then_run)


if cpu_platform():
    # Only where the user chose the CPU platform by verl's own variable; see verl_fp8/cpu/platform.py.
    import verl_fp8.cpu.platform  # noqa: F401
