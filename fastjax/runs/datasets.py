"""From the settings of a run to its batches and number of steps; run and preview agree by construction.

Nothing here imports JAX.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from fastjax.data import Batches, Dataset, StreamedBatches, prepare
from fastjax.data.batches import BatchSource
from fastjax.data.grouping import ByLength
from fastjax.data.settings import DataSource
from fastjax.data.sources import OpenSource, check_sources
from fastjax.errors import ConfigError
from fastjax.limits import MAX_STEPS
from fastjax.training.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


#: Data sets in memory, by "train" and "eval".
Given = Mapping[str, Sequence[OpenSource]]
_NONE: Given = {}


class RunData(NamedTuple):
    """The data of a run.

    Attributes:
        train: the training data.
        held_out: the held-out data; None: there are none.
        batches: the training batches.
        total_steps: the number of updates of the run.
    """

    train: Dataset | StreamedBatches
    held_out: Dataset | None
    batches: BatchSource
    total_steps: int

    @property
    def document_lengths(self) -> Int64[np.ndarray, " D"] | None:
        """Tokens of each document of an epoch; None for streamed data."""
        if isinstance(self.train, StreamedBatches):
            return None
        return self.train.rows.documents.lengths[self.train.rows.order]

    @property
    def documents_per_row(self) -> int | None:
        """Documents in the fullest training row, where rows have fields of their documents; None: they have none."""
        if isinstance(self.train, StreamedBatches) or not self.train.rows.fields:
            return None
        return self.train.rows.documents_per_row

    @property
    def max_token_id(self) -> int:
        """The largest token id in the data read so far."""
        return max((data.max_token_id for data in (self.train, self.held_out) if isinstance(data, Dataset)), default=0)

    @property
    def row_lengths(self) -> str:
        """The lengths of a training batch's rows, and how much of them is no padding, in words."""
        *others, longest = (f"{length:,}" for length in self.batches.lengths)
        lengths = f"of {', '.join(others)} or {longest} tokens" if others else f"of {longest} tokens"
        if not isinstance(self.batches, Batches):
            return lengths
        return f"{lengths} ({self.batches.slots_filled(self.total_steps):.1%} of the slots filled)"

    def statistics(self) -> dict[str, str]:
        """The statistics of each data set, and of the training batches, in words."""
        named = {"train": self.train, "held out": self.held_out}
        said = {
            name: str(data.statistics) if isinstance(data, Dataset) else "streamed"
            for name, data in named.items()
            if data is not None
        }
        return said | {"rows of a batch": self.row_lengths}


def load_run_data(
    config: TrainConfig,
    tokenizer: "PreTrainedTokenizerFast",
    progress: Callable[[str], None] | None = None,
    replicas: int = 1,
    given: Given = _NONE,
    *,
    parts: int = 1,
    now: str | None = None,
    before: Mapping[str, Any] = _NONE,
) -> RunData:
    """Read, encode and pack a run's training data and held-out data; training data that are streamed are only opened.

    Args:
        config: the settings.
        tokenizer: the run's, of `open_model`; it has the chat template of the settings afterwards.
        progress: takes a message for people now and then.
        replicas: devices, or groups of them, that take per_device_train_batch_size rows each.
        given: data sets that are open already, by "train" and "eval", in place of the settings'.
        parts: equal ones into which devices cut a row's tokens.
        now: the time that the chat template tells, in ISO 8601; None: as of `prepare`. The held-out data have the
            training data's.
        before: the position in the data (`BatchSource.position`) of a run that is resumed.

    Raises:
        ConfigError: settings that do not suit the data or the tokenizer.
        DataError: what is wrong with the data.
        OSError: a file that cannot be read.
    """
    settings, sources = config.training, _sources(config, given)
    if any(isinstance(source, DataSource) and source.streaming for source in sources["train"]):
        length, size = config.model.max_seq_length, settings.per_device_train_batch_size * replicas
        how: Any = {"multiple": parts, "now": now, "options": config.data, "seed": settings.seed, "progress": progress}
        steps = settings.gradient_accumulation_steps
        train = StreamedBatches(sources["train"], tokenizer, length, size, steps, **how)
    else:
        train = _prepared(config, sources["train"], tokenizer, progress, now)
    held_out = read_held_out(config, tokenizer, progress, given, now=train.now)
    if isinstance(train, StreamedBatches):
        return RunData(train, held_out, train, _total_steps(config, train))
    size, by_length = settings.per_device_train_batch_size * replicas, None
    if settings.group_by_length:
        by_length = ByLength(train.rows.lengths)
    batches = Batches(train.rows, size, settings.gradient_accumulation_steps, seed=settings.seed, by_length=by_length)
    total = _total_steps(config, batches)
    return RunData(train, held_out, batches.shortened(total, parts, tuple(before.get("lengths", ()))), total)


def read_held_out(
    config: TrainConfig,
    tokenizer: "PreTrainedTokenizerFast",
    progress: Callable[[str], None] | None = None,
    given: Given = _NONE,
    *,
    now: str | None = None,
) -> Dataset | None:
    """Read, encode and pack a run's held-out data; None: there are none.

    Args:
        config: as of `load_run_data`, as are the others.
        tokenizer: as there.
        progress: as there.
        given: as there.
        now: as there.
    """
    sources = _sources(config, given)
    apart = sources["eval"] if config.data.val_set_size is None else sources["train"]
    return _prepared(config, apart, tokenizer, progress, now, held_out=True) if apart else None


def _sources(config: TrainConfig, given: Given) -> dict[str, list[Any]]:
    """The data sets by "train" and "eval", those that are to be opened looked at."""
    sources = {name: list(given.get(name) or config.data.sources(name)) for name in ("train", "eval")}
    check_sources(source for listed in sources.values() for source in listed if isinstance(source, DataSource))
    return sources


def _prepared(
    config: TrainConfig, sources: list[Any], tokenizer: Any, progress: Any, now: str | None, held_out: bool = False
) -> Dataset:
    pairing = config.preferences.pairing
    return prepare(
        sources,
        tokenizer,
        config.model.max_seq_length,
        config.data,
        seed=config.training.seed,
        preferences=None if pairing is None else (pairing, *config.preferences.lengths),
        held_out=held_out,
        now=now,
        progress=progress,
    )


def _total_steps(config: TrainConfig, batches: BatchSource) -> int:
    """The number of updates of the run."""
    if config.training.max_steps is not None:
        return config.training.max_steps
    assert batches.steps_per_epoch is not None, "streamed data come with max_steps, which TrainConfig checks"
    epochs = config.training.num_train_epochs
    steps = math.ceil(epochs * batches.steps_per_epoch)
    if steps > MAX_STEPS:
        raise ConfigError(f"training.num_train_epochs: expected at most {MAX_STEPS} steps, got {steps} by {epochs:g}")
    return steps
