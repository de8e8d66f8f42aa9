"""Whether a module of verl or vLLM has one of our hooks in its source (patches/): the runtime hook then stays away.

The patched source says so itself, in a constant beside the change: nothing is guessed from versions or code.
"""

from types import ModuleType

MARK = "VERL_FP8_PATCHES"


def carries(module: ModuleType, name: str) -> bool:
    """True if ``module`` has the hook ``name`` in its source."""
    return name in getattr(module, MARK, ())
