"""The modules of a model that get a low-rank adapter, with its rank and scale. No JAX."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from convert.adapter_config import selects, tuned_name
from convert.adapters import AdapterConfig, rank_and_alpha, scaling
from convert.errors import shown
from convert.expert_adapters import expert_shapes
from convert.families.mapping import family_of
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, TABLES, WeightPath
from convert.model.spec import ADAPTED
from convert.renamed_modules import is_renamed
from fastjax.errors import ConfigError
from fastjax.lora.tables import check_saved, savable, saved_modules

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AdapterSite:
    """One module with an adapter.

    Attributes:
        path: of the module.
        rank: of the adapter.
        scaling: of the adapter.
        shape: of the module's weight, (out, in); of a table (V, E); of experts (X, out, in).
    """

    path: WeightPath
    rank: int
    scaling: float
    shape: Shape

    def shapes(self, use_dora: bool) -> dict[str, Shape]:
        """The shapes of the adapter's arrays: A, B, and DoRA's magnitudes.

        Args:
            use_dora: whether there are any.
        """
        *experts, rows, columns = self.shape
        if self.path == EMBEDDING:
            arrays: dict[str, Shape] = {"lora_embedding_A": (self.rank, rows), "lora_embedding_B": (columns, self.rank)}
        else:
            arrays = {"lora_A": (*experts, self.rank, columns), "lora_B": (*experts, rows, self.rank)}
        magnitudes = columns if self.path == EMBEDDING else rows
        return arrays | ({"lora_magnitude_vector": (magnitudes,)} if use_dora else {})


def adapter_sites(adapter: AdapterConfig, config: ModelConfig) -> list[AdapterSite]:
    """The modules with an adapter, in the order of the model.

    Args:
        adapter: PEFT's settings.
        config: the model's.

    Raises:
        ConfigError: no match, names in `modules_to_save` besides embedding and head, or a combination that is not
            supported.
    """
    saved = saved_modules(adapter)
    check_saved(adapter, [name for name in savable(config) if name not in config.biases])  # PEFT trains a bias too
    _check_experts(adapter)
    sites = []
    family = family_of(config)
    for path, shape in candidates(config).items():
        if selects(adapter, path, family) and path not in saved:
            name = tuned_name(path, family)
            rank, _ = rank_and_alpha(adapter, name)
            sites.append(AdapterSite(path, rank, scaling(adapter, name), shape))
    if not sites and not adapter.modules_to_save:
        raise ConfigError(
            f"target_modules: {shown(adapter.target_modules)} matches no module of this model; there are "
            f"{', '.join(module_names(config))}"
        )
    names = [family.module_name(site.path) for site in sites]
    if adapter.use_dora and (renamed := [name for name in names if is_renamed(name, family)]):
        raise ConfigError(
            f"use_dora: expected false, or target_modules without {shown(renamed)}: PEFT holds an adapter on these "
            f"modules of a {config.model_type} model as one on their weights, which cannot have DoRA"
        )
    tied_targets = [site.path for site in sites if site.path in TABLES]
    if adapter.ensure_weight_tying and config.tie_word_embeddings and tied_targets:
        raise ConfigError(f"ensure_weight_tying: not supported with adapters on {tied_targets}; use modules_to_save")
    return sites


def candidates(config: ModelConfig) -> dict[WeightPath, Shape]:
    """All modules that can have an adapter, in the order of the model, and the shapes of their weights."""
    modules = [(spec.path.module, spec.shape) for spec in config.specs if spec.kind in ADAPTED]
    modules += [(path, shape[:3]) for path, shape in expert_shapes(config.specs).items()]
    tables = [(WeightPath(None, "", name, ""), (config.vocab_size, config.hidden_size)) for name in TABLES]
    layers = sorted(modules, key=lambda module: module[0].layer or 0)
    # PEFT adds a product to rows that are normalised already, and merges it into those that are not.
    first = [] if config.embedding_norm else tables[:1]
    return dict([*first, *layers, *([] if config.scored else tables[1:])])


def projections(config: ModelConfig) -> list[str]:
    """The names of the projections in a layer."""
    return _names(config, [spec.path.module for spec in config.specs if spec.kind == "matrix"])


def parameters(config: ModelConfig) -> list[str]:
    """The whole names of what `target_parameters` can select: routers' weights and experts' matrices."""
    family = family_of(config)
    paths = [path for path in candidates(config) if path.of_experts or path.is_router]
    return [tuned_name(path, family) for path in paths]


def _check_experts(adapter: AdapterConfig) -> None:
    """Refuse what adapters on experts cannot have; `AdapterConfig` refuses DoRA and dropout."""
    if adapter.target_parameters and adapter.init_lora_weights == "orthogonal":
        raise ConfigError(
            "init_lora_weights: expected true, false or 'gaussian' with target_parameters, got 'orthogonal'"
        )


def module_names(config: ModelConfig) -> list[str]:
    """The names that `target_modules` can list."""
    return _names(config, [path for path in candidates(config) if not path.of_experts and not path.is_router])


def _names(config: ModelConfig, modules: Sequence[WeightPath]) -> list[str]:
    """The last parts of modules' names in PEFT, each once."""
    family = family_of(config)
    return list(dict.fromkeys(WeightPath.parse(family.module_name(module)).part for module in modules))


def layer_signatures(sites: Sequence[AdapterSite], layers: int) -> list[tuple[Any, ...]]:
    """For each layer what its adapters must share with another layer's in one stack.

    Args:
        sites: the adapters' modules.
        layers: number of layers.
    """
    signatures: list[list[Any]] = [[] for _ in range(layers)]
    for site in sites:
        if site.path.layer is not None:
            signatures[site.path.layer].append((site.path.inside, site.rank, site.scaling))
    return [tuple(entries) for entries in signatures]
