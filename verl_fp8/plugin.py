"""Entry point of the ``verl.plugins`` group: makes the Hydra groups ``fp8`` and ``is_correction`` known.

verl imports this module in every process right after its own package (verl/__init__.py) and swallows whatever it raises at
DEBUG level, so nothing here may fail and nothing heavy may be imported: no torch, no verl.workers.
"""

import os

from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin


class Fp8SearchPath(SearchPathPlugin):
    """Puts ``verl_fp8/conf`` on the search path of every Hydra application of the process."""

    def manipulate_search_path(self, search_path) -> None:
        search_path.append("verl_fp8", "pkg://verl_fp8.conf")


Plugins.instance().register(Fp8SearchPath)

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    # Only where the user chose the CPU platform by verl's own variable; see verl_fp8/cpu.py.
    import verl_fp8.cpu  # noqa: F401
