"""The parts a rule is made of: reading the configuration, a :class:`Refusal`, and a table of :class:`Key` rows.

A rule is a function ``(run) -> Iterator[Refusal]``. It reads and yields; it writes nothing and starts nothing. Most
rules say "this key must have one of these values". Those are the rows of a table, and every row that does not hold is a
refusal.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fp8.errors import ConfigError, Fp8Error, is_number


def get(config: DictConfig, path: str, default: Any = None) -> Any:
    """A value by dotted path, interpolations resolved, ``default`` where it is absent or null."""
    value = OmegaConf.select(config, path, default=default)
    return default if value is None else value


def number(config: DictConfig, path: str, default: float) -> float:
    """:func:`get` for a number.

    Raises:
        ConfigError: it is none.
    """
    value = get(config, path, default)
    if not is_number(value):
        raise ConfigError(f"{path}={value!r}", "not a number", f"set {path} to a number")
    return value


@dataclass(frozen=True)
class Refusal:
    """One reason not to start the run, as :class:`verl_fp8.errors.Fp8Error` says it.

    Attributes:
        asked: what was asked.
        found: what contradicts it.
        fix: the key that resolves it.
        kind: the exception that says so.
        cause: the exception behind it, if there is one.
    """

    asked: str
    found: str
    fix: str
    kind: type[Fp8Error] = ConfigError
    cause: BaseException | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, error: Fp8Error) -> "Refusal":
        """The refusal that an error of ours is."""
        return cls(error.asked, error.found, error.fix, type(error), error.__cause__)

    def error(self) -> Fp8Error:
        """The exception to raise."""
        error = self.kind(self.asked, self.found, self.fix)
        error.__cause__ = self.cause
        return error

    def __str__(self) -> str:
        return str(self.error())


def refusal(config: DictConfig, asked: str, path: str, why: str, fix: str) -> Refusal:
    """The refusal that names ``path`` and its value, with ``why`` after it; ``{path}`` in ``fix`` is the path."""
    return Refusal(asked, f"{path}={get(config, path)}{why}", fix.replace("{path}", path))


def caught(act: Callable, *args: Any, **kwargs: Any) -> Iterator[Refusal]:
    """The error of ours that a check below the rules ends with, as a refusal."""
    try:
        act(*args, **kwargs)
    except Fp8Error as error:
        yield Refusal.of(error)


@dataclass(frozen=True)
class Key:
    """A row of a table: what one key of the configuration must be.

    Attributes:
        path: dotted.
        allowed: the values that may stand there, or a question that such a value answers with yes.
        why: follows the value in the message; starts with its own punctuation.
        fix: what to do; ``{path}`` in it is the path.
        default: what verl reads where the key is absent or null.
        numeric: refuse what is no number first.
    """

    path: str
    allowed: tuple | Callable[[Any], bool]
    why: str
    fix: str
    default: Any = None
    numeric: bool = False

    def holds(self, config: DictConfig) -> bool:
        """Whether the key is as it must be.

        Raises:
            ConfigError: ``numeric``, and it is no number.
        """
        value = (number if self.numeric else get)(config, self.path, self.default)
        return self.allowed(value) if callable(self.allowed) else value in self.allowed


def off(value: Any) -> bool:
    """``Key.allowed`` for a switch that must not be on."""
    return not value


def zero(value: float) -> bool:
    """``Key.allowed`` for a number that must be none of something."""
    return not value > 0


def table(config: DictConfig, asked: str, keys: Iterable[Key]) -> Iterator[Refusal]:
    """A refusal for each row that does not hold, in the order given."""
    for key in keys:
        try:
            if not key.holds(config):
                yield refusal(config, asked, key.path, key.why, key.fix)
        except ConfigError as error:
            yield Refusal.of(error)
