"""The modules named in `float32_modules` and in other settings, and the weights in `unfrozen_parameters`. No JAX."""

import re
from collections.abc import Iterable, Sequence

from convert.errors import shorten, shown
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, HEAD, NORM, SCORE, TABLES, WeightPath
from fastjax.errors import ConfigError


def module_paths(names: Iterable[str], config: ModelConfig, setting: str = "float32_modules") -> frozenset[WeightPath]:
    """The paths of the modules named in a setting, and of all modules inside them.

    Args:
        names: of modules, or the ends of names.
        config: the model's.
        setting: its name.

    Raises:
        ConfigError: a name that no module has.
    """
    if isinstance(names, str):
        raise ConfigError(f"{setting}: expected a list of names, got the text {shown(names)}")
    paths = list(_paths(config))
    selected: set[WeightPath] = set()
    for name in names:
        wanted = name.removeprefix("model.")
        chosen = [path for path in paths if path == wanted or path.endswith(f".{wanted}")]
        if not wanted or not chosen:
            named = [path for path in paths if path.layer in (None, 0)]
            ends = sorted({str(end) for path in named for end in (path.inside, path.part)} - {""})
            raise ConfigError(
                f"{setting}: no module has the name {shown(name)} or a name that ends with it; there are "
                f"{ends}, in layers.0 to layers.{config.num_hidden_layers - 1} or beside the layers"
            )
        selected.update(path for path in paths for top in chosen if path == top or path.startswith(f"{top}."))
    if config.tie_word_embeddings and selected & set(TABLES):
        selected.add(WeightPath(None, "", EMBEDDING, ""))  # one array for both: it is held once
    return frozenset(selected)


def frozen_arrays(config: ModelConfig, patterns: Sequence[str] | None) -> frozenset[WeightPath]:
    """The paths in memory of the arrays that are not trained.

    Args:
        config: the model's.
        patterns: as `LoadOptions.unfrozen_parameters`; None: all are trained.

    Raises:
        ConfigError: no regular expression, one that fits no name, or one that fits some projections of one array.
    """
    if patterns is None:
        return frozenset()
    try:
        wanted = {text: re.compile(text) for text in patterns}
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"unfrozen_parameters: expected regular expressions, got {patterns}: {error}") from None
    used: set[str] = set()
    parts: dict[WeightPath, set[bool]] = {}
    names: dict[WeightPath, list[str]] = {}
    for spec in config.specs:
        layer = spec.path.layer
        calls = [spec.name]
        if layer is not None:  # from the end, too
            calls.append(spec.name.replace(f"layers.{layer}.", f"layers.{layer - config.num_hidden_layers}.", 1))
        fitting = {text for text, pattern in wanted.items() if any(map(pattern.match, calls))}
        used |= fitting
        group = None if layer is None or spec.group is None else config.groups(layer)[spec.group]
        path = spec.path if group is None else group.path.in_layer(layer).with_leaf(spec.path.leaf)
        parts.setdefault(path, set()).add(bool(fitting))
        names.setdefault(path, []).append(spec.name)
    if missing := [text for text in wanted if text not in used]:
        some = ", ".join(sorted({re.sub(r"layers[.]\d+", "layers.0", spec.name) for spec in config.specs}))
        raise ConfigError(
            f"unfrozen_parameters: {shown(missing[0])}: expected the beginning of a name, got one that none has; there "
            f"are {shorten(some, 1000)}"
        )
    if mixed := next((path for path, trained in parts.items() if len(trained) > 1), None):
        raise ConfigError(
            f"unfrozen_parameters: expected all or none of {', '.join(names[mixed])}, which are one array, got some"
        )
    return frozenset(path for path, trained in parts.items() if trained == {False})


def _paths(config: ModelConfig) -> Iterable[WeightPath]:
    """Every module that can be named."""
    head = SCORE if config.scored else HEAD
    yield from (WeightPath(None, "", part, "") for part in (EMBEDDING, NORM, head, "layers"))
    for index in range(config.num_hidden_layers):
        blocks = dict.fromkeys(group.block for group in config.groups(index).values())
        modules = dict.fromkeys(spec.path.module for spec in config.layer_specs(index))
        yield from (WeightPath(index, "", block, "") for block in ("", *blocks))
        yield from (module.in_layer(index) for module in modules)
