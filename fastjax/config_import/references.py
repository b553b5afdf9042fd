"""References between the values of a file, as OmegaConf has them: `${output_dir}`, `${model.name}`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.errors import shorten, shown
from fastjax.config_import.job import flat
from fastjax.errors import ConfigError

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def resolved(content: Mapping[Any, Any], file: Path) -> Mapping[Any, Any]:
    """A file's content with the values that its references stand for.

    Raises:
        ConfigError: a reference to nothing, to a section, in a circle, or a resolver such as `${oc.env:HOME}`.
    """
    leaves = {name: value for name, value in flat(content) if not isinstance(value, Mapping)}

    def replace(value: Any, seen: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: replace(item, seen) for key, item in value.items()}
        if isinstance(value, list):
            return [replace(item, seen) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if whole := _REFERENCE.fullmatch(value):
            return look_up(whole[1], seen)
        text = _REFERENCE.sub(lambda match: str(look_up(match[1], seen)), value)
        if "${" in text:
            raise ConfigError(f"{file}: expected references such as ${{output_dir}}, got {shown(value, 80)}")
        return text

    def look_up(name: str, seen: tuple[str, ...]) -> Any:
        if name not in leaves or name in seen:
            why = "to itself" if name in seen else "to nothing"
            raise ConfigError(f"{file}: ${{{shorten(name, 80)}}}: expected a reference to another value, got one {why}")
        return replace(leaves[name], (*seen, name))

    return replace(content, ())
