"""Entry point of the ``verl.plugins`` group: makes the Hydra groups ``fp8`` and ``is_correction`` known, and verl's
driver check them.

verl imports this module in every process right after its own package (verl/__init__.py) and swallows whatever it raises
at DEBUG level, so nothing here may fail and nothing heavy may be imported: no torch, no verl.workers.
"""

import os

import wrapt

from verl_fp8.upstream import patched


@wrapt.when_imported("hydra.core.plugins")
def _add_search_path(module) -> None:
    # When Hydra is imported, not before: it would double the time that importing verl takes more with this package.
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Fp8SearchPath(SearchPathPlugin):
        """Puts ``verl_fp8/conf`` on the search path of every Hydra application of the process."""

        def manipulate_search_path(self, search_path) -> None:
            search_path.append("verl_fp8", "pkg://verl_fp8.conf")

    module.Plugins.instance().register(Fp8SearchPath)


def _validate_config(wrapped, instance, args, kwargs):
    from verl_fp8.rules.run import validate_run

    validate_run(kwargs["config"] if "config" in kwargs else args[0])
    return wrapped(*args, **kwargs)


@wrapt.when_imported("verl.utils.config")
def _check_on_the_driver(module) -> None:
    # Our classes check too (verl_fp8/hooks/targets.py), but an override, or a recipe that names the groups before ppo_trainer,
    # may have put verl's own classes back: then nobody else would look, and the run would train without what was asked
    # for.
    if not patched.carries(module, "validate_config"):
        wrapt.wrap_function_wrapper(module, "validate_config", _validate_config)


def _run_ppo(wrapped, instance, args, kwargs):
    from verl_fp8.rules.run import validate_entry

    config = kwargs["config"] if "config" in kwargs else args[0]
    validate_entry(config, kwargs["task_runner_class"] if "task_runner_class" in kwargs else args[1])
    return wrapped(*args, **kwargs)


@wrapt.when_imported("verl.trainer.main_ppo")
def _check_other_entry_points(module) -> None:
    # `python -m verl.trainer.main_ppo` does not import it. Who does is an entry point of its own (one_step_off_policy,
    # fully_async_policy, recipes): they share run_ppo, but validate nothing on the driver and bring trainers that the
    # stage is not attached to.
    wrapt.wrap_function_wrapper(module, "run_ppo", _run_ppo)


if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    # Only where the user chose the CPU platform by verl's own variable; see verl_fp8/cpu/platform.py.
    import verl_fp8.cpu.platform  # noqa: F401
