"""The modules named in `float32_modules` and in other settings. No JAX."""

from collections.abc import Iterable

from convert.errors import shown
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


def _paths(config: ModelConfig) -> Iterable[WeightPath]:
    """Every module that can be named."""
    head = SCORE if config.scored else HEAD
    yield from (WeightPath(None, "", part, "") for part in (EMBEDDING, NORM, head, "layers"))
    for index in range(config.num_hidden_layers):
        blocks = dict.fromkeys(group.block for group in config.groups(index).values())
        modules = dict.fromkeys(spec.path.module for spec in config.layer_specs(index))
        yield from (WeightPath(index, "", block, "") for block in ("", *blocks))
        yield from (module.in_layer(index) for module in modules)
