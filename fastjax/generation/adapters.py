"""Models over one base with an adapter each, as one decoder: each row of a batch chooses its own (`lora.joined`)."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from convert.errors import listed, shown
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.lora.joined import joined, rank_owners
from fastjax.lora.params import Constant, LoraLinear
from fastjax.models.leaves import Leaf, leaf_at
from fastjax.models.moe import Router
from fastjax.models.projection import Projection, low_rank_adapters

#: Number of a row without an adapter.
NO_ADAPTER = -1


@dataclasses.dataclass(frozen=True)
class AdapterSet:
    """The adapters of an engine.

    Attributes:
        model: the model with all of them.
        numbers: of each name; None: of what the model itself was.
    """

    model: LanguageModel
    numbers: Mapping[str | None, int]

    def number(self, name: str | None) -> int:
        """The number of an adapter.

        Args:
            name: its name; None: what the model itself is.

        Raises:
            ConfigError: there is none of that name.
        """
        if name is None or (isinstance(name, str) and name in self.numbers):
            return self.numbers[name]
        names = [each for each in self.numbers if each is not None]
        there = f"one of {listed(names)}" if names else "None, since the engine has been given no adapters"
        raise ConfigError(f"adapter: expected {there}, got {shown(name)}")

    def of_value(self, model: LanguageModel) -> "AdapterSet":
        """The same adapters around another value of the model.

        Args:
            model: the value, without other adapters.

        Raises:
            ConfigError: there are others, which it lacks.
        """
        if len(self.numbers) > 1:
            raise ConfigError("engine.model: expected the one with adapters, got another; make an engine with that one")
        return dataclasses.replace(self, model=model)


def join_adapters(model: LanguageModel, adapters: Mapping[str, LanguageModel]) -> AdapterSet:
    """One model of several over one base.

    Args:
        model: with or without an adapter.
        adapters: by name, models with an adapter; none: `model` stays as it is.

    Raises:
        ConfigError: a model without an adapter, over another base, with layers arranged otherwise, or with anything
            but low-rank adapters on the layers' projections.
    """
    if not adapters:
        return AdapterSet(model, {None: NO_ADAPTER})
    for name, other in adapters.items():
        _check_base(model, other, f"adapters: {shown(name)}")
    own = [] if model.lora is None else [model]
    if own:
        _check_kind(model, "adapters: the model's own")
    models = [*own, *adapters.values()]
    numbers = {name: number for number, name in enumerate(adapters, len(own))}
    return AdapterSet(_joined_model(model, models), {None: 0 if own else NO_ADAPTER, **numbers})


def _joined_model(model: LanguageModel, models: Sequence[LanguageModel]) -> LanguageModel:
    """The model with the adapters of all in the place of its own; their arrays are held anew, in the compute dtype."""
    decoder, modules = model.module(), [each.module() for each in models]
    ranks = [max(each.lora_A.get_value().shape[-2] for each in low_rank_adapters(module)) for module in modules]
    found = [dict(_projections(module)) for module in modules]
    wide = bool(model.precision.float32_modules)
    for path, projection in _projections(decoder):
        dtype = jnp.dtype(jnp.float32) if wide or isinstance(projection, Router) else model.dtype
        of_models = [each[path].adapters for each in found]
        present = [part for part, _ in projection.parts if any(part in each for each in of_models)]
        both: dict[str, LoraLinear] = {}
        for part in present:
            both[part] = joined([each.get(part) for each in of_models], ranks, dtype)
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
