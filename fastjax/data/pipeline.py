"""Data sets to packed rows: read, split, mix, encode, pack and store, one after the other."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Int64

from fastjax.data import cache
from fastjax.data.columns import parse_row
from fastjax.data.dataset import Dataset, DataStatistics
from fastjax.data.encoded import Say, encode_records
from fastjax.data.encoding import Encoder
from fastjax.data.mixture import choose, split_off
from fastjax.data.named_templates import set_chat_template
from fastjax.data.packing import PackedRows
from fastjax.data.preference_columns import parse_preference
from fastjax.data.preference_groups import encode_preferences
from fastjax.data.records import PreferenceRecord
from fastjax.data.settings import NO_CACHE, DataOptions, Exhaustion, Pairing
from fastjax.data.sources import OpenSource, Sources, open_sources
from fastjax.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def prepare(
    sources: Sources,
    tokenizer: "PreTrainedTokenizerFast",
    max_seq_length: int,
    options: DataOptions = NO_CACHE,
    *,
    held_out: bool = False,
    preferences: tuple[Pairing, *tuple[int | None, ...]] | None = None,
    seed: int = 0,
    now: str | None = None,
    progress: Say | None = None,
) -> Dataset:
    """Read, mix, encode and pack data sets.

    Args:
        sources: A path, a description of a data set, rows in memory (a `datasets.Dataset`, an iterable of dicts), or
            several of these.
        tokenizer: The model's tokenizer; it has the options' chat template afterwards.
        max_seq_length: Tokens in a row.
        options: The treatment of the rows; without any the defaults, and no cache.
        held_out: With `val_set_size`, whether the examples are those held out, or the others.
        preferences: The pairing of answers and their greatest lengths, the last arguments of `encode_preferences`;
            None: examples of one answer.
        seed: Seed of the random parts of a mixture.
        now: The time that the chat template's `strftime_now` tells, in ISO 8601; None: the present, or what kept data
            have, whose first run's date stays.
        progress: Takes messages for people; None: no messages.

    Raises:
        OSError: A file or data set that cannot be read.
        ConfigError: A tokenizer without EOS, or without a chat template that is needed; a wrong option.
        DataError: A row that cannot be used, no row at all, or none with a token to learn.
    """
    opened = open_data(sources, tokenizer, options)
    size, folder = options.val_set_size, None
    if options.cache_dir is not None:
        split = () if size is None else (size, held_out)
        shaping = [*shaped_by(options, max_seq_length), options.mixture_ends, seed, *split, *(preferences or ())]
        shaping += ["deduplicate"] * options.deduplicate  # others keep the names that they had
        folder = Path(options.cache_dir).expanduser() / identity(opened, tokenizer, shaping)
        entry = cache.load(folder)
        if entry is not None and (now is None or entry[1].get("now") in (None, now)):
            return _from_cache(*entry)
    encoder, now = timed_encoder(tokenizer, options, now)
    read = _read(opened, options, preferences)
    if options.deduplicate:
        read = _distinct(read, progress)
    if size is not None:
        read = _split(read, size, held_out)
    records, order = _mix(read, options.mixture_ends, seed, progress)
    where = ", ".join(one.path for one in read)
    if preferences:
        encoded = encode_preferences(records, encoder, max_seq_length, where, progress, *preferences)
    else:
        encoded = encode_records(records, encoder, max_seq_length, where, progress)
    dataset = encoded.packed(records, max_seq_length, options, order)._replace(now=now)
    if folder is not None:
        extra = {"statistics": dataset.statistics._asdict(), "max_token_id": dataset.max_token_id, "now": now}
        cache.store(folder, dataset.rows, extra | {"fingerprint": dataset.fingerprint}, progress)
    return dataset


def open_data(
    sources: Sources, tokenizer: "PreTrainedTokenizerFast", options: DataOptions, *, streaming: bool = False
) -> list[OpenSource]:
    """Find data sets, and give the tokenizer the chat template of the options.

    Args:
        sources: The data sets.
        tokenizer: The tokenizer; changed in place.
        options: Their options.
        streaming: See `open_sources`.

    Raises:
        OSError: A missing file or data set.
        ConfigError: No data set, a contradictory description, or a tokenizer without the template's tokens.
        DataError: `datasets` cannot read a data set.
    """
    if streaming and options.deduplicate:
        raise ConfigError("data.deduplicate: expected false for streamed data, got true")
    if options.chat_template is not None:
        set_chat_template(tokenizer, options.chat_template)
    return open_sources(sources, options.columns, streaming=streaming)


def timed_encoder(
    tokenizer: "PreTrainedTokenizerFast", options: DataOptions, now: str | None
) -> tuple[Encoder, str | None]:
    """The encoder of a data set, and the time that the chat template tells in all of its rows.

    Args:
        tokenizer: The tokenizer, with the chat template.
        options: The options of the data.
        now: The time in ISO 8601; None: the present.

    Returns:
        The encoder; and the time, None where the template asks for none.
    """
    if "strftime_now" in str(tokenizer.chat_template):
        now = now or datetime.now().isoformat(timespec="seconds")
    else:
        now = None
    return Encoder(tokenizer, options, now), now


def shaped_by(options: DataOptions, max_seq_length: int) -> list[Any]:
    """The options by which an example becomes documents of rows, for `identity`.

    Args:
        options: The options of the data.
        max_seq_length: Tokens in a row.
    """
    return [
        *(max_seq_length, options.loss_on, options.special_tokens, options.chat_template_kwargs),
        *(options.too_long, options.packing, options.chat_template is not None),
    ]


def identity(opened: Iterable[OpenSource], tokenizer: "PreTrainedTokenizerFast", shaping: Sequence[Any]) -> str:
    """A fingerprint of everything that shapes prepared data, without preparing them.

    The date of a template that writes one is not part of it.

    Args:
        opened: The data sets.
        tokenizer: The tokenizer, with the chat template.
        shaping: Everything else, as JSON.

    Returns:
        Hexadecimal digits.

    Raises:
        OSError: A file that cannot be read.
    """
    shapes = {
        "format": cache.FORMAT,
        "tokenizers": tokenizers.__version__,
        "sources": [[s.identity(), s.source.path, list(map(str, s.files or ())), s.source.weight] for s in opened],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
        "options": shaping,
    }
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:32]


class _ReadSet(NamedTuple):
    path: str
    weight: float | None
    records: list[Any]


def _read(
    opened: Iterable[OpenSource], options: DataOptions, preferences: tuple[Pairing, *tuple[int | None, ...]] | None
) -> list[_ReadSet]:
    how: dict[str, Any] = {"templated": options.chat_template is not None}
    if preferences is None:
        how["parse"] = parse_row
    else:
        how |= {"parse": parse_preference, "pairing": preferences[0]}
    read = [_ReadSet(one.source.path, one.source.weight, list(one.records(**how))) for one in opened]
    for one in read:
        if not one.records:
            raise DataError(f"{one.path}: no examples")
    return read


def _distinct(read: Sequence[_ReadSet], progress: Say | None) -> list[_ReadSet]:
    """The data sets without the examples that an earlier one equals, wherever it stands."""
    seen: set[bytes] = set()

    def is_new(record: Any) -> bool:
        content = record._replace(where="")
        if isinstance(record, PreferenceRecord):
            content = content._replace(answers=tuple(answer._replace(where="") for answer in record.answers))
        digest = hashlib.sha256(json.dumps(content, default=_plain).encode()).digest()
        return digest not in seen and seen.add(digest) is None

    kept = [one._replace(records=list(filter(is_new, one.records))) for one in read]
    for one, before in zip(kept, read, strict=True):
        if progress is not None and len(one.records) < len(before.records):
            progress(
                f"{one.path}: {len(before.records) - len(one.records):,} of {len(before.records):,} are duplicates"
            )
    return [one for one in kept if one.records]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else repr(value)


def _split(read: Sequence[_ReadSet], size: float, held_out: bool) -> list[_ReadSet]:
    """The examples of each data set that are held out, or the others; data sets without any are left out."""
    chosen = []
    for one, numbers in zip(read, split_off([len(one.records) for one in read], size), strict=True):
        apart = set(numbers.tolist())
        records = [record for number, record in enumerate(one.records) if (number in apart) == held_out]
        chosen.append(one._replace(records=records))
    return [one for one in chosen if one.records]


def _mix(
    read: Sequence[_ReadSet], ends: Exhaustion, seed: int, progress: Say | None
) -> tuple[list[Any], Int64[np.ndarray, " _"]]:
    """The examples of an epoch, each once, and their order in it with repetitions."""
    chosen = choose([len(one.records) for one in read], [one.weight for one in read], ends, seed)
    if progress is not None and len(read) > 1:
        pairs = zip(read, chosen, strict=True)
        shares = [f"{one.path}: {len(part):,} of {len(one.records):,} examples" for one, part in pairs]
        progress(f"{'; '.join(shares)}; every epoch has the same ones, in another order")
    records: list[Any] = []
    order: list[np.ndarray] = []
    for one, part in zip(read, chosen, strict=True):
        distinct, places = np.unique(part, return_inverse=True)
        order.append(places + len(records))
        records += [one.records[number] for number in distinct.tolist()]
    return records, np.concatenate(order)


def _from_cache(rows: PackedRows, extra: dict[str, Any]) -> Dataset:
    statistics = DataStatistics(**extra["statistics"])
    return Dataset(rows, statistics, extra["fingerprint"], extra["max_token_id"], True, extra.get("now"))
