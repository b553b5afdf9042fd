"""Adapters over a model: fresh or read from arrays, attached where PEFT's rules say, and back to named arrays."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from convert.adapters import AdapterConfig
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, HEAD, TABLES, WeightPath
from fastjax.errors import ConfigError
from fastjax.lora import LoraEmbedding, LoraLinear, initial_arrays
from fastjax.models.adapter_settings import AdapterSite, adapter_sites, saved_modules
from fastjax.models.layout import Run, layer_of, stack
from fastjax.models.precision import Precision
from fastjax.models.vocabulary import trained_rows
from fastjax.quantization import WeightLike, dequantize
from fastjax.trainable_tokens import TrainableTokens


def build_adapters(
    adapter: AdapterConfig,
    config: ModelConfig,
    plan: Sequence[Run],
    weights: Mapping[str, Any],
    arrays: Mapping[str, Any] | None,
    key: PRNGKeyArray,
    precision: Precision,
) -> dict[str, Any]:
    """The adapter modules that `Decoder` takes.

    Args:
        adapter: PEFT's settings.
        config: the model's.
        plan: arrangement of the layers, with equal adapters within a run.
        weights: the frozen weights as `Decoder` takes them.
        arrays: an adapter's arrays by path as `convert.adapters` names them; None: fresh ones.
        key: random state of fresh ones; each module draws from it by its own path.
        precision: in which dtype what is trained is held.

    Raises:
        ConfigError: arrays that are missing, left over, or of the wrong shape (all named).
    """
    sites: dict[str, AdapterSite] = {site.path: site for site in adapter_sites(adapter, config)}
    source = _Source(adapter, config, plan, weights, None if arrays is None else dict(arrays), key, precision)
    by_run: list[list[dict[str, LoraLinear]]] = []
    for run in plan:
        by_run.append([])
        for position in range(run.period):
            indices = [run.start + position + n * run.period for n in range(run.count)]
            modules = [site.path.inside for site in sites.values() if site.path.layer == indices[0]]
            linears = {}
            for module in modules:
                leaves = [source.linear(sites[module.in_layer(index)]) for index in indices]
                leaf = leaves[0] if run.count == 1 else stack(leaves)
                scale = sites[module.in_layer(indices[0])].scaling
                linears[module] = LoraLinear(**leaf, scaling=scale, dropout=adapter.lora_dropout)
            by_run[-1].append(linears)
    result: dict[str, Any] = {"layers": by_run, "saved": source.saved(), "tokens": source.tokens()}
    if site := sites.get(EMBEDDING):
        result[EMBEDDING] = LoraEmbedding(**source.embedding(site), scaling=site.scaling)
    if site := sites.get(HEAD):
        result[HEAD] = LoraLinear(**source.linear(site), scaling=site.scaling, dropout=adapter.lora_dropout)
    source.finish()
    return result


class _Source:
    """Arrays for one module after another, fresh or from a file, checked."""

    def __init__(self, adapter, config, plan, weights, arrays: dict[str, Any] | None, key, precision: Precision):
        self.adapter, self.config, self.plan, self.weights, self.arrays = adapter, config, plan, weights, arrays
        self.key, self.precision, self.problems = key, precision, []

    def linear(self, site: AdapterSite) -> dict[str, Any]:
        rows, columns = self._shape(site.path)
        if self.arrays is None:
            key = jax.random.fold_in(self.key, zlib.crc32(site.path.encode()) & 0x7FFFFFFF)
            a, b = initial_arrays(key, self.adapter.init_lora_weights, site.rank, columns, rows)
        else:
            a = self._take(f"{site.path}.lora_A", (site.rank, columns))
            b = self._take(f"{site.path}.lora_B", (rows, site.rank))
        magnitude = None
        if self.adapter.use_dora and self.arrays is None:
            full = self._dense(site.path) + site.scaling * jnp.matmul(b, a, precision="highest")
            magnitude = jnp.linalg.norm(full, axis=1)
        elif self.adapter.use_dora:
            magnitude = self._take(f"{site.path}.lora_magnitude_vector", (rows,))
        return self._held(site.path, {"lora_A": a, "lora_B": b, "magnitude": magnitude})

    def embedding(self, site: AdapterSite) -> dict[str, Any]:
        vocabulary, width = self.config.vocab_size, self.config.hidden_size
        if self.arrays is None:
            first, second = jax.random.split(jax.random.fold_in(self.key, zlib.crc32(b"embed_tokens") & 0x7FFFFFFF))
            a = jnp.zeros((site.rank, vocabulary), jnp.float32)
            if self.adapter.init_lora_weights is False:
                a = jax.random.normal(first, a.shape, jnp.float32)
            b = jax.random.normal(second, (width, site.rank), jnp.float32)
        else:
            a = self._take(f"{site.path}.lora_embedding_A", (site.rank, vocabulary))
            b = self._take(f"{site.path}.lora_embedding_B", (width, site.rank))
        magnitude = None
        if self.adapter.use_dora and self.arrays is None:
            table = self.weights["embed_tokens"]["weight"].astype(jnp.float32)
            magnitude = jnp.linalg.norm(table + site.scaling * jnp.matmul(b, a, precision="highest").T, axis=0)
        elif self.adapter.use_dora:
            magnitude = self._take(f"{site.path}.lora_magnitude_vector", (width,))
        return self._held(site.path, {"lora_embedding_A": a, "lora_embedding_B": b, "magnitude": magnitude})

    def saved(self) -> dict[str, Array]:
        """Trainable copies of the modules that are trained whole."""
        names = saved_modules(self.adapter)
        tied = self.adapter.ensure_weight_tying and self.config.tie_word_embeddings
        copies = {}
        for name in names:
            home = "embed_tokens" if self.config.tie_word_embeddings else name
            weight = self.weights[home]["weight"]
            key = f"{name}.modules_to_save.weight"
            if self.arrays is not None and (not tied or key in self.arrays):
                weight = self._take(key, weight.shape)
            copies["tied" if tied else name] = self._held(name, {"weight": weight})["weight"]
        if tied and names and self.arrays is not None:
            for name in TABLES:
                self.arrays.pop(f"{name}.modules_to_save.weight", None)
        return copies

    def tokens(self) -> dict[str, TrainableTokens]:
        """The rows that are trained in tables that are not."""
        modules = {}
        for place, indices in trained_rows(self.adapter, self.config).items():
            table = "embed_tokens" if place == "tied" else place
            home = "embed_tokens" if self.config.tie_word_embeddings else table
            rows = self.weights[home]["weight"][np.asarray(indices, np.int32)]
            if self.arrays is not None:
                rows = self._take(f"{table}.trainable_tokens_delta", rows.shape)
                if place == "tied":  # PEFT writes a copy where the vocabulary has grown
                    self.arrays.pop("lm_head.trainable_tokens_delta", None)
            modules[place] = TrainableTokens(indices, self._held(table, {"rows": rows})["rows"])
        return modules

    def finish(self) -> None:
        """Refuse what was missing or is left over; frozen base matrices that PEFT saves beside adapters may be left."""
        left = [name for name in self.arrays or () if WeightPath.parse(name).leaf != "base_layer.weight"]
        problems = self.problems + [f"{name}: no module of this model takes it" for name in left]
        if problems:
            listed = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ConfigError(f"adapter does not fit the model: {listed}")

    def _held(self, module: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Arrays of a module in the dtype of its trained arrays; None stays."""
        dtype = self.precision.weight_dtype(WeightPath.parse(module), trained=True)
        return {name: None if array is None else jnp.asarray(array, dtype) for name, array in arrays.items()}

    def _take(self, name: str, shape: tuple[int, ...]) -> Array:
        assert self.arrays is not None
        array = self.arrays.pop(name, None)
        if array is None or tuple(array.shape) != tuple(shape):
            given = "nothing" if array is None else list(array.shape)
            self.problems.append(f"{name}: expected {list(shape)}, given {given}")
            return jnp.zeros(shape, jnp.float32)
        return jnp.asarray(np.asarray(array).astype(np.float32))

    def _shape(self, path: WeightPath) -> tuple[int, int]:
        if path.layer is None:
            return self.config.vocab_size, self.config.hidden_size
        group = self.config.group_of(path)
        return dict(group.parts)[path.part], group.columns

    def _dense(self, path: WeightPath) -> Array:
        """The frozen matrix under an adapter, float32."""
        if path.layer is None:
            home = EMBEDDING if self.config.tie_word_embeddings else HEAD
            return self.weights[home]["weight"].astype(jnp.float32)
        group = self.config.group_of(path)
        layer = layer_of(self.weights["layers"], self.plan, path.layer)
        weight: WeightLike = layer[group.block][group.name]["weight"]
        return dequantize(weight, jnp.float32)[group.place(path.part)[1]]


def export_adapters(trainable: Mapping[str, Any], plan: Sequence[Run], tied: bool) -> dict[str, np.ndarray]:
    """An adapter's trained arrays by path, as `convert.adapters` names them.

    Args:
        trainable: the trained arrays of a decoder with adapters.
        plan: arrangement of its layers.
        tied: whether one saved array stands for the embeddings and the head.
    """
    arrays: dict[str, np.ndarray] = {}
    names = {"magnitude": "lora_magnitude_vector"}
    for number, positions in trainable.get("layers", {}).items():
        run = plan[number]
        for position, blocks in positions.items():
            for block, inside in blocks.items():
                for adapters in inside.values():
                    for part, leaves in adapters["adapters"].items():
                        for leaf, value in leaves.items():
                            host = np.asarray(value)
                            for n in range(run.count):
                                index = run.start + position + n * run.period
                                path = f"layers.{index}.{block}.{part}.{names.get(leaf, leaf)}"
                                arrays[path] = host if run.count == 1 else host[n]
    for leaf, value in trainable.get("embed_tokens", {}).get("adapter", {}).items():
        arrays[f"embed_tokens.{names.get(leaf, leaf)}"] = np.asarray(value)
    for leaf, value in trainable.get("lm_head", {}).get("adapters", {}).get("lm_head", {}).items():
        arrays[f"lm_head.{names.get(leaf, leaf)}"] = np.asarray(value)
    for name in TABLES:
        if "weight" in trainable.get(name, {}):
            arrays[f"{name}.modules_to_save.weight"] = np.asarray(trainable[name]["weight"])
        for leaf, value in trainable.get(name, {}).get("tokens", {}).items():
            arrays[f"{name}.{leaf}"] = np.asarray(value)
    if tied:
        copies = [f"{name}.modules_to_save.weight" for name in TABLES]
        shared = next(arrays[name] for name in copies if name in arrays)
        arrays.update(dict.fromkeys(copies, shared))
    return arrays
