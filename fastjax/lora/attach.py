"""The arrays of an adapter, fresh or from a folder, as modules: those of each layer, and those of the tables."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from convert.adapters import AdapterConfig
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, WeightPath
from fastjax.lora.fit import check_shapes
from fastjax.lora.initial import initial_arrays, initial_embedding
from fastjax.lora.params import LoraEmbedding, LoraLinear, SavedParam
from fastjax.lora.sites import AdapterSite, adapter_sites
from fastjax.lora.tables import TrainedTable, trained_tables
from fastjax.lora.token_rows import TrainableTokens


class Adapters(NamedTuple):
    """The modules of an adapter.

    Attributes:
        layers: for each layer, path inside it -> adapter; a model arranges them as its layer stacks.
        embedding: adapter of the embedding, or None.
        head: adapter of the head, or None.
        whole: table -> its trained array; one object for both where they are tied.
        rows: table -> its trained rows; one object for tied tables.
    """

    layers: Sequence[Any]
    embedding: LoraEmbedding | None = None
    head: LoraLinear | None = None
    whole: Mapping[str, SavedParam] = {}
    rows: Mapping[str, TrainableTokens] = {}


def make_adapters(
    adapter: AdapterConfig,
    config: ModelConfig,
    arrays: Mapping[str, Any] | None,
    key: PRNGKeyArray,
    *,
    frozen: Callable[[WeightPath], Float[Array, "out in"]],
    dtype: Callable[[WeightPath], jnp.dtype],
) -> Adapters:
    """The modules of an adapter.

    Args:
        adapter: PEFT's settings.
        config: the model's.
        arrays: path -> array, as `convert.adapters` names them; None: fresh ones.
        key: random state of fresh ones; each module draws from it by its own path.
        frozen: module -> its frozen matrix, decoded.
        dtype: module -> dtype of its trained arrays.

    Raises:
        ConfigError: arrays that are missing, left over, or of the wrong shape (the first named).
    """
    if arrays is not None:
        check_shapes(adapter, config, {path: tuple(array.shape) for path, array in arrays.items()})
    source = _Source(adapter, config, arrays, key, frozen, dtype)
    layers: list[dict[WeightPath, Any]] = [{} for _ in range(config.num_hidden_layers)]
    tables: dict[str, Any] = {"embedding": None, "head": None, "whole": {}, "rows": {}}
    for site in adapter_sites(adapter, config):
        if site.path.layer is not None:
            layers[site.path.layer][site.path.inside] = source.adapter_of(site)
        else:
            tables["embedding" if site.path == EMBEDDING else "head"] = source.adapter_of(site)
    for table in trained_tables(adapter, config):
        array = source.table(table)
        if table.ids is None:
            tables["whole"] |= dict.fromkeys(table.uses, SavedParam(array))
        else:
            tables["rows"] |= dict.fromkeys(table.uses, TrainableTokens(table.ids, array))
    return Adapters(layers, **tables)


class _Source:
    """The arrays of one module after another, fresh or from a file."""

    def __init__(self, adapter, config, arrays: Mapping[str, Any] | None, key, frozen, dtype):
        self.adapter, self.config, self.arrays, self.key = adapter, config, arrays, key
        self.frozen, self.dtype = frozen, dtype

    def adapter_of(self, site: AdapterSite) -> LoraLinear | LoraEmbedding:
        """The adapter of a module."""
        leaves = site.shapes(self.adapter.use_dora)
        arrays = self._fresh(site) if self.arrays is None else [self._take(site.path, leaf) for leaf in leaves]
        a, b, *magnitude = (self._trained(site.path, array) for array in arrays)
        scale = magnitude[0] if magnitude else None
        if site.path == EMBEDDING:
            return LoraEmbedding(a, b, scale, scaling=site.scaling)
        return LoraLinear(a, b, scale, scaling=site.scaling, dropout=self.adapter.lora_dropout)

    def table(self, table: TrainedTable) -> Array:
        """The trained array of a table, or of rows of it."""
        path = table.stored(self.arrays or ())
        if self.arrays is not None:
            return self._trained(path.module, self._take(path.module, path.leaf))
        whole = self._table(path)
        return self._trained(path.module, whole if table.ids is None else whole[np.asarray(table.ids, np.int32)])

    def _fresh(self, site: AdapterSite) -> tuple[Array, ...]:
        """A and B of a fresh adapter, and DoRA's magnitudes."""
        key, method = self._key(site.path), self.adapter.init_lora_weights
        *experts, rows, columns = site.shape
        if site.path == EMBEDDING:
            return self._with_magnitude(site, *initial_embedding(key, method, site.rank, rows, columns), axis=0)

        def fresh(key: PRNGKeyArray) -> tuple[Array, Array]:
            return initial_arrays(key, method, site.rank, columns, rows)

        a, b = jax.vmap(fresh)(jax.random.split(key, *experts)) if experts else fresh(key)
        return self._with_magnitude(site, a, b, axis=1)

    def _key(self, module: WeightPath) -> PRNGKeyArray:
        return jax.random.fold_in(self.key, zlib.crc32(module.encode()) & 0x7FFFFFFF)

    def _with_magnitude(self, site: AdapterSite, a: Array, b: Array, *, axis: int) -> tuple[Array, ...]:
        """A and B; with DoRA also magnitudes, of the outputs (axis 1 of W) or of an embedding's features (axis 0)."""
        if not self.adapter.use_dora:
            return a, b
        delta = jnp.matmul(b, a, precision="highest")
        weight = self._table(site.path) if site.path.layer is None else self.frozen(site.path)
        full = weight.astype(jnp.float32) + site.scaling * (delta if axis == 1 else delta.T)
        return a, b, jnp.linalg.norm(full, axis=axis)

    def _trained(self, module: WeightPath, array: Array) -> Array:
        """An array in the dtype of the module's trained arrays."""
        return jnp.asarray(array, self.dtype(module))

    def _take(self, module: WeightPath, leaf: str) -> Array:
        assert self.arrays is not None
        return jax.device_put(np.asarray(self.arrays[module.with_leaf(leaf)]).astype(np.float32))

    def _table(self, path: WeightPath) -> Array:
        """The frozen table of a use; a tied head has the embedding's."""
        part = EMBEDDING if self.config.tie_word_embeddings else path.part
        return self.frozen(WeightPath(None, "", part, ""))
