"""Models over one base with an adapter each, as one decoder: each row of a batch chooses its own (`lora.joined`)."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from convert.errors import listed, shown
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.limits import MAX_RANK
from fastjax.lora.joined import put, rank_owners, room
from fastjax.lora.params import Constant, LoraLinear
from fastjax.models.leaves import Leaf, leaf_at
from fastjax.models.moe import Router
from fastjax.models.projection import Projection, low_rank_adapters

#: Number of a row without an adapter; the most slots of an engine.
NO_ADAPTER, MAX_SLOTS = -1, 128


@dataclasses.dataclass(frozen=True)
class AdapterSet:
    """The adapters of an engine, each in a slot: a part of the ranks of one adapter that all of them share.

    Attributes:
        model: the model with all of them.
        base: the model that they were added to.
        ranks: of each slot, that of the model's own adapter first.
        numbers: slot of each name; None: of what the model itself was.
    """

    model: LanguageModel
    base: LanguageModel
    ranks: tuple[int, ...]
    numbers: Mapping[str | None, int]

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters' names, in the order in which they came."""
        return tuple(name for name in self.numbers if name is not None)

    def number(self, name: str | None) -> int:
        """The slot of an adapter.

        Args:
            name: its name; None: what the model itself is.

        Raises:
            ConfigError: there is none of that name.
        """
        if name is None or (isinstance(name, str) and name in self.numbers):
            return self.numbers[name]
        there = f"one of {listed(self.names)}" if self.names else "None, since the engine has no adapters"
        raise ConfigError(f"adapter: expected {there}, got {shown(name)}")

    def with_adapter(self, name: str, model: LanguageModel, used: Collection[int] = ()) -> "AdapterSet":
        """These adapters and another one, in the smallest slot that has room for it; the shapes stay.

        Args:
            name: that no other has.
            model: with an adapter over `base`.
            used: slots that answers still need, though their adapters are gone.

        Raises:
            ConfigError: a name that is taken or none, an adapter that does not join, or no room for it.
        """
        what = f"adapters: {shown(name)}"
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{what}: expected a name of at least one character")
        if name in self.numbers:
            raise ConfigError(f"{what}: expected a name that no adapter has, got one of {listed(self.names)}; drop it")
        _check_base(self.base, model, what)
        free = [slot for slot in range(self._first, len(self.ranks)) if slot not in {*self.numbers.values(), *used}]
        if not free:
            slots, there = len(self.ranks) - self._first, listed(self.names) or "none"
            raise ConfigError(
                f"{what}: expected an engine with a free slot for it, got {slots} slots (adapter_slots), all taken, "
                f"with the adapters {there}" + ("; answers of dropped ones have not ended" if used else "")
            )
        rank, most = _rank(model), max(self.ranks[slot] for slot in free)
        if rank > most:
            raise ConfigError(f"{what}: expected a rank of at most {most} (adapter_rank), got {rank}")
        slot = min((slot for slot in free if self.ranks[slot] >= rank), key=self.ranks.__getitem__)
        return self._put(model, slot, what).named(name, slot)

    def without(self, name: str) -> "AdapterSet":
        """The other adapters; what stands in the slot stays until another takes it.

        Args:
            name: of the one to drop.

        Raises:
            ConfigError: there is none of that name.
        """
        if name is None:
            raise ConfigError("adapter: expected the name of one to drop, got None, which is the model itself")
        self.number(name)
        return dataclasses.replace(self, numbers={key: slot for key, slot in self.numbers.items() if key != name})

    def named(self, name: str | None, slot: int) -> "AdapterSet":
        """These adapters with a name for a slot."""
        return dataclasses.replace(self, numbers={**self.numbers, name: slot})

    def of_value(self, model: LanguageModel) -> "AdapterSet":
        """These adapters around another value of the model.

        Args:
            model: the value, without other adapters.

        Raises:
            ConfigError: there are others, or slots for them, which it lacks.
        """
        if self.ranks:
            raise ConfigError("engine.model: expected the one with adapters, got another; make an engine with that one")
        return dataclasses.replace(self, model=model, base=model)

    @property
    def _first(self) -> int:
        """The first slot that is not of the model's own adapter."""
        return 0 if self.base.lora is None else 1

    def _put(self, model: LanguageModel, slot: int, what: str) -> "AdapterSet":
        """These adapters with a model's in a slot."""
        start, theirs = sum(self.ranks[:slot]), dict(jax.tree_util.tree_leaves_with_path(model.trainable))
        factors = {
            path: each.scaling for path, each in nnx.iter_modules(model.module()) if isinstance(each, LoraLinear)
        }

        def joined(path: tuple[Any, ...], whole: Array) -> Array:
            *module, leaf = (entry.key for entry in path)
            axis, factor = (-2, 1.0) if leaf == "lora_A" else (-1, factors.get(tuple(module), 1.0))
            return put(whole, theirs.pop(path, None), range(start, start + self.ranks[slot]), axis, factor)

        # Not by its modules: splitting them leaves cycles, which hold the arrays until they are collected.
        trainable = jax.tree_util.tree_map_with_path(joined, self.model.trainable)
        if theirs:
            raise ConfigError(
                f"{what}: expected an adapter on modules that the engine's slots have, got one on "
                f"{listed(list(dict.fromkeys(path[-2].key for path in theirs)))} too; name it in Engine(adapters=…)"
            )
        return dataclasses.replace(self, model=self.model.replace(trainable=trainable))


def join_adapters(
    model: LanguageModel, adapters: Mapping[str, LanguageModel], slots: int | None = None, rank: int | None = None
) -> AdapterSet:
    """One model of several over one base.

    Args:
        model: with or without an adapter.
        adapters: by name, models with an adapter.
        slots: how many adapters there may be at a time, on any projections of the layers; None: those that are given,
            on the projections that they have; without any `model` stays as it is.
        rank: the most that an adapter may have; None: the largest of those given, or 16. Without `slots` each has its
            own.

    Raises:
        ConfigError: a model without an adapter, over another base, with layers arranged otherwise, or with anything
            but low-rank adapters on the layers' projections; more adapters than slots, or of a higher rank.
    """
    for name, other in adapters.items():
        _check_base(model, other, f"adapters: {shown(name)}")
    own = [] if model.lora is None else [model]
    ranks = [_rank(each) for each in adapters.values()]
    if slots is not None:
        for name, value, most in (("adapter_slots", slots, MAX_SLOTS), ("adapter_rank", rank, MAX_RANK)):
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"{name}: expected an integer from 1 to {most}, got {shown(value)}")
        ranks = [max(ranks, default=16) if rank is None else rank] * slots
    elif rank is not None:
        raise ConfigError(f"adapter_rank: expected adapter_slots beside it, got {shown(rank)} alone")
    if not ranks:
        return AdapterSet(model, model, (), {None: NO_ADAPTER})
    if own:
        _check_kind(model, "adapters: the model's own")
    ranks = [*(_rank(each) for each in own), *ranks]
    joined = _with_room(model, [*own, *adapters.values()], ranks, everywhere=slots is not None)
    found = AdapterSet(joined, model, tuple(ranks), {None: NO_ADAPTER})
    if own:
        found = found._put(model, 0, "").named(None, 0)
    for name, other in adapters.items():
        found = found.with_adapter(name, other)
    return found


def _rank(model: LanguageModel) -> int:
    """The largest rank of a model's adapters."""
    return max(each.lora_A.get_value().shape[-2] for each in low_rank_adapters(model.module()))


def _with_room(
    model: LanguageModel, models: Sequence[LanguageModel], ranks: Sequence[int], *, everywhere: bool
) -> LanguageModel:
    """The model with room for adapters in the place of its own, on all projections or those where models have any."""
    decoder, found = model.module(), [dict(_projections(each.module())) for each in models]
    wide = bool(model.precision.float32_modules)
    for path, projection in _projections(decoder):
        leaf = leaf_at(path)
        every = everywhere and leaf.stack is not None and not leaf.of_experts and not isinstance(projection, Router)
        count = 1 if leaf.stack is None else model.plan[leaf.stack].count
        dtype = jnp.dtype(jnp.float32) if wide or isinstance(projection, Router) else model.dtype
        columns = projection.weight.get_value().shape[-1]
        leading = () if count == 1 else (count,)
        both: dict[str, LoraLinear] = {}
        for part, rows in projection.parts:
            if every or any(part in each[path].adapters for each in found):
                both[part] = room(leading, rows, columns, ranks, dtype)
        projection.adapters = nnx.Dict(both)
    decoder.rank_owners = nnx.data(Constant(jnp.asarray(rank_owners(ranks))))
    graphdef, trainable, frozen = nnx.split(decoder, model.trainable_filter, ...)
    return model.replace(graphdef=graphdef, trainable=nnx.to_pure_dict(trainable), frozen=nnx.to_pure_dict(frozen))


def _projections(module: nnx.Module) -> list[tuple[tuple, Projection]]:
    return [(path, each) for path, each in nnx.iter_modules(module) if isinstance(each, Projection)]


def _check_base(model: LanguageModel, other: LanguageModel, what: str) -> None:
    """Refuse a model that is no adapter over the same base.

    Raises:
        ConfigError: it is not.
    """
    if other.lora is None:
        raise ConfigError(f"{what}: expected a model with an adapter, got one without; None chooses the base")
    _check_kind(other, what)
    fields = [field.name for field in dataclasses.fields(model.config)]
    unlike = [name for name in fields if getattr(model.config, name) != getattr(other.config, name)]
    if model.base != other.base:
        told = ["none" if each.base is None else each.base.told for each in (other, model)]
        unlike.append(f"base ({told[0]}, not {told[1]})")
    if model.dtype != other.dtype:
        unlike.append(f"dtype ({other.dtype}, not {model.dtype})")
    if not unlike and model.plan != other.plan:
        raise ConfigError(
            f"{what}: expected the layers alike, as the engine's model has them, got some with an adapter of another "
            "kind (layers_to_transform, rank_pattern or alpha_pattern); run an engine of its own for it"
        )
    if not unlike and model.base is None and not _same_arrays(model, other):
        unlike.append("arrays")
    if unlike:
        raise ConfigError(
            f"{what}: expected an adapter over the engine's model, got one over a model that differs in "
            f"{listed(unlike)}; add all adapters to one loaded model (FastLanguageModel.load_adapter)"
        )


def _check_kind(model: LanguageModel, what: str) -> None:
    """Refuse what does not join with other adapters.

    Raises:
        ConfigError: there is such.
    """
    paths = [leaf_at(path) for path, _ in jax.tree_util.tree_leaves_with_path(model.trainable)]
    reasons = [reason for leaf in paths if (reason := _why_not_joined(leaf)) is not None]
    if model.quantization_aware is not None:
        reasons.append("quantisation-aware training")
    if reasons:
        raise ConfigError(
            f"{what}: expected low-rank adapters on projections of the layers alone, got "
            f"{listed(list(dict.fromkeys(reasons)))}; "
            "merge it (save_pretrained_merged) or run an engine of its own for it"
        )


def _why_not_joined(leaf: Leaf) -> str | None:
    """The reason, a noun, that a trained array does not join with other adapters'; None: it does."""
    if leaf.kind == "magnitude":
        return "use_dora"
    if leaf.kind == "trainable_tokens_delta":
        return "trainable_token_indices"
    if leaf.of_experts:
        return "adapters on experts (target_parameters)"
    if leaf.stack is None:
        return f"a trained {leaf.keys[0]}"
    return None if leaf.kind in ("lora_A", "lora_B") else f"a trained {'.'.join(leaf.keys)}"


def _same_arrays(model: LanguageModel, other: LanguageModel) -> bool:
    """Whether both hold the very same frozen arrays."""
    mine, theirs = (jax.tree.leaves(each.frozen) for each in (model, other))
    return len(mine) == len(theirs) and all(left is right for left, right in zip(mine, theirs, strict=True))
