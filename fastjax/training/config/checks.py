"""How a setting out of range is refused."""

from typing import Any

from fastjax.errors import ConfigError


def expect(name: str, value: Any, holds: bool, expected: str) -> None:
    """Refuse a value, by its full name, unless it holds."""
    if not holds:
        raise ConfigError(f"{name}: expected a value {expected}, given {value!r}")
