"""Reading the composed configuration, and refusing one of its keys."""

from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from verl_fp8.errors import ConfigError


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
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{path}={value!r}", "not a number", f"set {path} to a number")
    return value


def refuse(asked: str, config: DictConfig, path: str, why: str, fix: str) -> NoReturn:
    """Raise the ConfigError that names ``path`` and its value."""
    raise ConfigError(asked, f"{path}={get(config, path)}{why}", fix)
