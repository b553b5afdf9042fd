"""Which modules the names in `float32_modules` mean. No JAX."""

from collections.abc import Iterable

from convert.errors import shown
from convert.model.config import ModelConfig
from convert.model.structure import groups, norms
from fastjax.errors import ConfigError


def module_paths(names: Iterable[str], config: ModelConfig) -> frozenset[str]:
    """The paths that `float32_modules` means: of the modules named, and of all modules inside them.

    Args:
        names: of modules, or the ends of names.
        config: the model that has the modules.

    Raises:
        ConfigError: a name that no module has.
    """
    if isinstance(names, str):
        raise ConfigError(f"float32_modules: expected a list of names, given the text {shown(names)}")
    paths = list(_paths(config))
    kept: set[str] = set()
    for name in names:
        wanted = name.removeprefix("model.")
        chosen = [path for path in paths if path == wanted or path.endswith(f".{wanted}")]
        if not wanted or not chosen:
            ends = sorted({part for path in paths for part in (path.split(".", 2)[-1], path.split(".")[-1])} - {"0"})
            ends = [end for end in ends if not end.isdigit()]
            raise ConfigError(
                f"float32_modules: no module has the name {shown(name)} or a name that ends with it; there are "
                f"{ends}, in layers.0 to layers.{config.num_hidden_layers - 1} or beside the layers"
            )
        kept.update(path for path in paths for top in chosen if path == top or path.startswith(f"{top}."))
    if config.tie_word_embeddings and kept & {"embed_tokens", "lm_head"}:
        kept |= {"embed_tokens"}  # one array for both: it is held once
    return frozenset(kept)


def _paths(config: ModelConfig) -> Iterable[str]:
    """Every module that can be named."""
    yield from ("embed_tokens", "norm", "lm_head", "layers")
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        yield from (layer, *(f"{layer}.{name}" for name in norms(config)), f"{layer}.self_attn", f"{layer}.mlp")
        for name, group in groups(config).items():
            yield from (f"{layer}.{name.split('.')[0]}.{part}" for part, _ in group.parts)
