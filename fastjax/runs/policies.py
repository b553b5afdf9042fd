"""The policies of rematerialisation that a run chooses from, and the settings with which its step holds less."""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

from fastjax.errors import ConfigError
from fastjax.execution.chunks import AUTO_CHUNK, AUTO_TOKENS, CHUNK, check_chunk
from fastjax.execution.policies import POLICIES, candidates, holds_more, memory_rank, policy_of
from fastjax.execution.remat import compiler_options
from fastjax.language_model import LanguageModel
from fastjax.language_model.host import with_host_embedding, with_host_layers
from fastjax.language_model.variants import with_checkpointing
from fastjax.parallel import MeshShape
from fastjax.training.config import TrainConfig


def run_candidates(config: TrainConfig, shape: MeshShape) -> tuple[str, ...]:
    """The policies that a run chooses from, the fastest first.

    Args:
        config: the run.
        shape: of the mesh.
    """
    hidden = shape.size == 1 and config.model.scans
    return candidates(hidden=hidden)


def less_memory(
    config: TrainConfig, model: LanguageModel, shape: MeshShape, policy: str, others: Collection[str] = ()
) -> list[str]:
    """Settings with which a run's step holds less on the device, as "section.key: value".

    Args:
        config: the run.
        model: its own, or one of shapes.
        shape: of the mesh.
        policy: of rematerialisation, which the step has.
        others: policies that are known not to fit.

    Returns:
        Those that the run could use and has not set.
    """
    return list(_settings(config, model, shape, policy, others))


def way_out(settings: Collection[str], rows: int | None = None) -> str:
    """The advice where a step does not fit, as a sentence without its full stop.

    Args:
        settings: of `less_memory`.
        rows: of a device's microbatch; None: not known.
    """
    batch = "training.per_device_train_batch_size (and raise gradient_accumulation_steps as much) or "
    lower = f"ower {'' if rows == 1 else batch}model.max_seq_length"
    return f"Set {' or '.join(settings)}, or l{lower}" if settings else f"L{lower}"


def _settings(
    config: TrainConfig, model: LanguageModel, shape: MeshShape, policy: str, others: Collection[str]
) -> Iterator[str]:
    if (below := _below(config, model, shape, policy, others)) is not None:
        yield f"model.use_gradient_checkpointing: {below}"
    if shape.size == 1:
        if not config.model.offload_layers and _taken(lambda: with_host_layers(model)):
            yield "model.offload_layers: true"
        if not config.model.offload_embedding and _taken(lambda: with_host_embedding(model)):
            yield "model.offload_embedding: true"
        training = dataclasses.replace(config.training, offload_optimizer=True)
        if not config.training.offload_optimizer and _taken(lambda: dataclasses.replace(config, training=training)):
            yield "training.offload_optimizer: true"
    if _whole_mlps(config, model, shape, policy):
        yield f"model.{CHUNK}: {AUTO_CHUNK}"


def _below(
    config: TrainConfig, model: LanguageModel, shape: MeshShape, policy: str, others: Collection[str]
) -> str | None:
    """The fastest policy that holds less on the device than this one; None: there is none."""
    name, _, first = policy.partition(":")
    rest = policy_of(policy, int(first)) if first else name
    more, least = sorted((name, rest), key=memory_rank)

    def suits(other: str) -> bool:
        if any(other == one or holds_more(other, one) for one in others):
            return False
        return _taken(lambda: compiler_options(with_checkpointing(model, other).graphdef))

    less = [least] if holds_more(more, least) else []
    less += [other for other in run_candidates(config, shape) if holds_more(least, other)]
    return next(filter(suits, less), None)


def _whole_mlps(config: TrainConfig, model: LanguageModel, shape: MeshShape, policy: str) -> bool:
    """Whether MLPs are computed for more tokens at a time than a chunk has, and chunks would cost no products."""
    named, chunk = POLICIES[policy.partition(":")[0]], model.execution.chunk
    tokens = config.training.per_device_train_batch_size * config.model.max_seq_length // shape.context
    whole = chunk is None or (chunk == "auto" and tokens < AUTO_TOKENS)
    served = shape.tensor == 1 and model.quantization_aware is None
    again = named is not None and "projection" not in named.kept
    served &= _taken(lambda: check_chunk(AUTO_CHUNK, model.config))
    return whole and again and served and tokens > AUTO_CHUNK


def _taken(setting: Callable[[], Any]) -> bool:
    """Whether a setting is not refused."""
    try:
        setting()
    except ConfigError:
        return False
    return True
