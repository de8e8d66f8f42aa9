"""The exceptions verl_fp8 raises at its users.

Every message says what was asked, what was found and what to do about it. Precision is never decided by a warning: a
wish that cannot be met raises one of these.
"""

from typing import Any


class Fp8Error(Exception):
    """Base of every error raised by verl_fp8.

    Args:
        asked: what the user or the code wanted, naming the configuration key where there is one.
        found: what was there instead, with the offending value.
        fix: the key or the action that resolves it.
    """

    def __init__(self, asked: str, found: str, fix: str) -> None:
        super().__init__(f"asked: {asked}; found: {found}; fix: {fix}")
        self.asked = asked
        self.found = found
        self.fix = fix

    def __reduce__(self):
        # Ray pickles exceptions across processes; BaseException would rebuild from args, i.e. from the one joined
        # sentence.
        return type(self), (self.asked, self.found, self.fix)


class ConfigError(Fp8Error, ValueError):
    """A switch has a wrong value, or two switches contradict each other."""


class DataError(Fp8Error, ValueError):
    """A tensor cannot be used as it is: wrong dtype or shape, or NaN or infinity in a weight."""


class ContractError(Fp8Error, RuntimeError):
    """A symbol or version of verl, vLLM or TransformerEngine is not as this package relies on."""


class SyncError(Fp8Error, RuntimeError):
    """The trainer and the rollout disagree: weight checksums, layer lists or recipes."""


def is_number(value: Any) -> bool:
    """Whether a configured value is a number. To Python ``True`` is one; to a user ``true`` is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
