"""verl's own switch for machines without a GPU, read in one place. Imports nothing heavy: every process asks it."""

import os
from collections.abc import Mapping


def cpu_platform(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``VERL_PLATFORM=cpu`` is set. With it neither verl nor vLLM looks at a GPU.

    Args:
        environment: of the process that is asked about; this one's by default.
    """
    return environment.get("VERL_PLATFORM", "").strip().lower() == "cpu"
