"""The settings of a run beside their defaults."""

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastjax.training.config import TrainConfig


class Setting(NamedTuple):
    """One setting.

    Attributes:
        name: section.key.
        value: as YAML would write it.
        default: as YAML would write it; "" if it has none.
        changed: whether the two differ.
    """

    name: str
    value: str
    default: str
    changed: bool


def default_settings() -> dict[str, dict[str, Any]]:
    """The default of every setting that has one, by section."""
    sections = {}
    for name, section in typing.get_type_hints(TrainConfig).items():
        sections[name] = {}
        for field in dataclasses.fields(section):
            if field.default is not dataclasses.MISSING:
                sections[name][field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                sections[name][field.name] = field.default_factory()
    return sections


def list_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Setting]:
    """The settings in one list, those that differ from their defaults first.

    Args:
        config: section → key → value.
        defaults: the same for the defaults; a missing key has none.
    """
    settings = []
    for section, values in config.items():
        for key, value in values.items():
            known = key in defaults.get(section, {})
            default = defaults[section][key] if known else None
            shown = _show(default) if known else ""
            settings.append(Setting(f"{section}.{key}", _show(value), shown, not known or value != default))
    return sorted(settings, key=lambda setting: not setting.changed)


def _show(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
