"""What this package relies on in verl and vLLM: versions now, symbols below; enforced at run time and by tests/contract."""

import importlib.metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_fp8.errors import ContractError

VERSIONS = {
    "verl": SpecifierSet(">=0.9,<0.10"),
    "vllm": SpecifierSet(">=0.24,<0.31"),
}


def require_versions(*, vllm: bool = True) -> None:
    """Refuse versions of verl (and vLLM) this package has not been tried with.

    Raises:
        ContractError: names the package, the range and the version found.
    """
    for name in ("verl", "vllm") if vllm else ("verl",):
        found = _installed(name)
        if found is None:
            raise ContractError(f"{name}{VERSIONS[name]}", "not installed", f"pip install '{name}{VERSIONS[name]}'")
        if not VERSIONS[name].contains(Version(found).base_version):
            raise ContractError(f"{name}{VERSIONS[name]}", f"{name} {found}", f"pip install '{name}{VERSIONS[name]}'")


def _installed(name: str) -> str | None:
    for candidate in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
