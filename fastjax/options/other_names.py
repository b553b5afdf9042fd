"""Keywords of other libraries that are no options here: as data, what becomes of each."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from convert.errors import shown
from fastjax.errors import ConfigError


class OtherNames(NamedTuple):
    """The keywords of other libraries that a function takes beside its own.

    A value that is off (None, False, 0, "", [] or {}) asks for nothing, whatever the name.

    Attributes:
        not_needed: names that change nothing here, whatever their value.
        only: name → the values that mean what is done here, and what to use for others, after "use".
        served: name → its value as keywords of the function's own; it may raise ConfigError.
    """

    not_needed: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Collection[Any], str]] = {}
    served: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {}

    @property
    def known(self) -> frozenset[str]:
        """All the names."""
        return self.not_needed | self.only.keys() | self.served.keys()

    def translated(self, where: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The function's own keywords in the place of others.

        Args:
            where: the function's name, for errors.
            given: keywords of which each is `known`.

        Raises:
            ConfigError: a value that is not served, with what to use instead.
        """
        own: dict[str, Any] = {}
        for name, value in given.items():
            if name in self.served:
                own |= self.served[name](value)
            elif name in self.only and not _is_off(value):
                values, instead = self.only[name]
                if not any(type(value) is type(one) and value == one for one in values):
                    listed = f" or {' or '.join(map(repr, values))}" if values else ""
                    raise ConfigError(f"{where}: {name}: expected none{listed}, got {shown(value, 60)}; use {instead}")
        return own


def _is_off(value: Any) -> bool:
    """Whether a value asks for nothing; an array, of which nobody knows, does not."""
    return value is None or (isinstance(value, bool | int | float | str | list | tuple | dict) and not value)
