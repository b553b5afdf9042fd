"""The arrays of an adapter, fresh or from a folder, as modules: those of each layer, and those of the tables."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from convert.adapters import AdapterConfig
from convert.expert_adapters import expert_shapes
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, WeightPath
from convert.model.spec import ADAPTED
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
        rows: table -> its trained rows, likewise.
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
    layers: list[dict[WeightPath, LoraLinear]] = [{} for _ in range(config.num_hidden_layers)]
    tables: dict[str, Any] = {"embedding": None, "head": None, "whole": {}, "rows": {}}
    for site in adapter_sites(adapter, config):
        if site.path.of_experts:
            layers[site.path.layer or 0][site.path.inside] = source.experts(site)
        elif site.path.layer is not None:
            layers[site.path.layer][site.path.inside] = source.linear(site)
        elif site.path == EMBEDDING:
            tables["embedding"] = source.embedding(site)
        else:
            tables["head"] = source.linear(site)
    for table in trained_tables(adapter, config):
        if table.ids is None:
            tables["whole"] |= dict.fromkeys(table.uses, source.whole(table))
        else:
            tables["rows"] |= dict.fromkeys(table.uses, source.rows(table, table.ids))
    return Adapters(layers, **tables)


class _Source:
    """The arrays of one module after another, fresh or from a file."""

    def __init__(self, adapter, config, arrays: Mapping[str, Any] | None, key, frozen, dtype):
        self.adapter, self.config, self.arrays, self.key = adapter, config, arrays, key
        self.frozen, self.dtype = frozen, dtype
        self._shapes = {spec.path.module: spec.shape for spec in config.specs if spec.kind in ADAPTED}
        self._experts = expert_shapes(config.specs)

    def linear(self, site: AdapterSite) -> LoraLinear:
        rows, columns = self._shape(site.path)
        if self.arrays is None:
            a, b = initial_arrays(self._key(site.path), self.adapter.init_lora_weights, site.rank, columns, rows)
        else:
            a, b = (self._take(site.path, leaf) for leaf in ("lora_A", "lora_B"))
        magnitude = self._magnitude(site, b, a, axis=1)
        held = self._held(site.path, a, b, magnitude)
        return LoraLinear(*held, scaling=site.scaling, dropout=self.adapter.lora_dropout)

    def experts(self, site: AdapterSite) -> LoraLinear:
        experts, rows, columns, *_ = self._experts[site.path]
        if self.arrays is None:
            keys = jax.random.split(self._key(site.path), experts)
            method = self.adapter.init_lora_weights
            a, b = jax.vmap(lambda key: initial_arrays(key, method, site.rank, columns, rows))(keys)
        else:
            a, b = (self._take(site.path, leaf) for leaf in ("lora_A", "lora_B"))
        return LoraLinear(*self._held(site.path, a, b, None), scaling=site.scaling, dropout=0.0)

    def embedding(self, site: AdapterSite) -> LoraEmbedding:
        vocabulary, width = self._shape(site.path)
        if self.arrays is None:
            a, b = initial_embedding(self._key(site.path), self.adapter.init_lora_weights, site.rank, vocabulary, width)
        else:
            a, b = (self._take(site.path, leaf) for leaf in ("lora_embedding_A", "lora_embedding_B"))
        magnitude = self._magnitude(site, b, a, axis=0)
        return LoraEmbedding(*self._held(site.path, a, b, magnitude), scaling=site.scaling)

    def whole(self, table: TrainedTable) -> SavedParam:
        paths = [WeightPath(None, "", name, "modules_to_save.weight") for name in table.uses]
        stored = next((path for path in paths if path in (self.arrays or ())), paths[0])
        weight = self._table(stored)
        if self.arrays is not None:
            weight = self._take(stored.module, stored.leaf)
        return SavedParam(self._held(stored.module, weight)[0])

    def rows(self, table: TrainedTable, ids: tuple[int, ...]) -> TrainableTokens:
        paths = [WeightPath(None, "", name, "trainable_tokens_delta") for name in table.uses]
        rows = self._table(paths[0])[np.asarray(ids, np.int32)]
        if self.arrays is not None:
            rows = self._take(paths[0].module, paths[0].leaf)
        return TrainableTokens(ids, self._held(paths[0].module, rows)[0])

    def _key(self, module: WeightPath) -> PRNGKeyArray:
        return jax.random.fold_in(self.key, zlib.crc32(module.encode()) & 0x7FFFFFFF)

    def _magnitude(self, site: AdapterSite, b: Array, a: Array, *, axis: int) -> Array | None:
        """DoRA's magnitudes: of the outputs (axis 1 of W), or of an embedding's features (axis 0)."""
        if not self.adapter.use_dora:
            return None
        if self.arrays is not None:
            return self._take(site.path, "lora_magnitude_vector")
        delta = jnp.matmul(b, a, precision="highest")
        weight = self._table(site.path) if site.path.layer is None else self.frozen(site.path)
        full = weight.astype(jnp.float32) + site.scaling * (delta if axis == 1 else delta.T)
        return jnp.linalg.norm(full, axis=axis)

    def _held(self, module: WeightPath, *arrays: Array | None) -> list[Any]:
        """Arrays in the dtype of the module's trained arrays; None stays."""
        return [None if array is None else jnp.asarray(array, self.dtype(module)) for array in arrays]

    def _take(self, module: WeightPath, leaf: str) -> Array:
        assert self.arrays is not None
        return jnp.asarray(np.asarray(self.arrays[module.with_leaf(leaf)]).astype(np.float32))

    def _shape(self, path: WeightPath) -> tuple[int, int]:
        if path.layer is None:
            return self.config.vocab_size, self.config.hidden_size
        rows, columns = self._shapes[path]
        return rows, columns

    def _table(self, path: WeightPath) -> Array:
        """The frozen table of a use; a tied head has the embedding's."""
        part = EMBEDDING if self.config.tie_word_embeddings else path.part
        return self.frozen(WeightPath(None, "", part, ""))
