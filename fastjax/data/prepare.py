"""Data sets to packed rows."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from convert.errors import shown
from fastjax.data import cache, notes
from fastjax.data.dataset import Dataset
from fastjax.data.documents import Documents
from fastjax.data.encoded import Encoded, told
from fastjax.data.encoding import Encoder
from fastjax.data.mixture import choose, split_off
from fastjax.data.named_templates import set_chat_template
from fastjax.data.packing import PackedRows
from fastjax.data.preference_groups import encode_preferences
from fastjax.data.records import Record
from fastjax.data.settings import PARTS, Exhaustion, LossOn, Pairing, SpecialTokens, TooLong
from fastjax.data.sources import OpenSource, Sources, open_sources
from fastjax.data.statistics import DataStatistics
from fastjax.data.template_environment import strftime_at
from fastjax.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def prepare(
    sources: Sources,
    tokenizer: "PreTrainedTokenizerFast",
    max_seq_length: int,
    *,
    chat_template: str | None = None,
    loss_on: LossOn = "responses",
    special_tokens: SpecialTokens = "control",
    chat_template_kwargs: dict[str, Any] | None = None,
    too_long: TooLong = "truncate",
    packing: bool = True,
    mixture_ends: Exhaustion = "first_exhausted",
    seed: int = 0,
    split: tuple[float, bool] | None = None,
    preferences: tuple[Pairing, int | None] | None = None,
    cache_dir: str | Path | None = None,
    now: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Dataset:
    """Read, mix, encode and pack data sets.

    Args:
        sources: A path, a description of a data set, rows in memory (a `datasets.Dataset`, an iterable of dicts), or
            several of these.
        tokenizer: The model's tokenizer.
        max_seq_length: Tokens in a row.
        chat_template: A named template or a file, set on the tokenizer; None: the tokenizer's own.
        loss_on: The target tokens; see `Encoder`.
        special_tokens: The reading of special tokens in content; see `Encoder`.
        chat_template_kwargs: Variables of the chat template; see `Encoder`.
        too_long: The treatment of examples longer than a row; see `Documents`.
        packing: Whether examples share rows.
        mixture_ends: The end of an epoch with weights; see `choose`.
        seed: Of the random parts of a mixture.
        split: How much is held out (`split_off`), and whether it is that which is wanted; None: everything is.
        preferences: Of answers, their pairing and `max_length` (`encode_preferences`); None: examples of one answer.
        cache_dir: Folder of the cache; None: no cache.
        now: The time that the chat template's `strftime_now` tells, in ISO 8601; None: the present, or what kept data
            have, whose first run's date stays.
        progress: Takes messages for people; None: no messages.

    Raises:
        OSError: A file or data set that cannot be read.
        ConfigError: A tokenizer without EOS, or without a chat template that is needed; a wrong option.
        DataError: A row that cannot be used, no row at all, or none with a token to learn.
    """
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    opened = open_sources(sources)
    options = [
        max_seq_length,
        loss_on,
        special_tokens,
        chat_template_kwargs,
        too_long,
        packing,
        chat_template is not None,
    ]
    folder = None
    if cache_dir is not None:
        key = identity(opened, tokenizer, [*options, mixture_ends, seed, *(split or ()), *(preferences or ())])
        folder = Path(cache_dir).expanduser() / key
        found = cache.load(folder)
        if found is not None and (now is None or found[1].get("now") in (None, now)):
            return _dataset(*found)
    now, variables = told_time(tokenizer, now, chat_template_kwargs)
    templated = chat_template is not None
    records: list[list[Any]] = [
        list(source.preferences(preferences[0], templated=templated))
        if preferences
        else list(source.records(templated=templated))
        for source in opened
    ]
    names = [source.source.path for source in opened]
    for name, read in zip(names, records, strict=True):
        if not read:
            raise DataError(f"{name}: no examples")
    if split is not None:
        held_out = [set(part.tolist()) for part in split_off([len(read) for read in records], split[0])]
        records = [
            [record for index, record in enumerate(read) if (index in part) == split[1]]
            for read, part in zip(records, held_out, strict=True)
        ]
        opened = [one for one, read in zip(opened, records, strict=True) if read]
        records = [read for read in records if read]
        names = [source.source.path for source in opened]
    chosen = choose([len(read) for read in records], [s.source.weight for s in opened], mixture_ends, seed)
    if progress is not None and len(opened) > 1:
        parts = zip(names, chosen, records, strict=True)
        shares = [f"{name}: {len(part):,} of {len(read):,} examples" for name, part, read in parts]
        progress(f"{'; '.join(shares)}; every epoch has the same ones, in another order")
    used: list[Any] = []
    order: list[np.ndarray] = []
    for read, part in zip(records, chosen, strict=True):
        distinct, places = np.unique(part, return_inverse=True)
        order.append(places + len(used))
        used += [read[index] for index in distinct.tolist()]
    encoder = Encoder(tokenizer, loss_on, special_tokens, variables)
    where = ", ".join(names)
    if preferences:
        pairing, max_length = preferences
        encoded = encode_preferences(
            used, encoder, max_seq_length, too_long, where, progress, pairing=pairing, max_length=max_length
        )
    else:
        encoded = encode_records(used, encoder, max_seq_length, too_long, where, progress)
    dataset = encoded.packed(
        used, max_seq_length, packing=packing, order=np.concatenate(order), special_tokens=special_tokens
    )
    dataset = dataset._replace(now=now)
    if folder is not None:
        extra = {"statistics": dataset.statistics._asdict(), "max_token_id": dataset.max_token_id, "now": now}
        cache.store(folder, dataset.rows, extra | {"fingerprint": dataset.fingerprint}, progress)
    return dataset


def encode_records(
    records: Sequence[Record],
    encoder: Encoder,
    max_seq_length: int,
    too_long: TooLong,
    where: str,
    progress: Callable[[str], None] | None,
) -> Encoded:
    """Encode examples as documents that fit a row.

    Args:
        records: The examples.
        encoder: Of their texts.
        max_seq_length: Tokens in a row.
        too_long: The treatment of examples longer than a row; see `Documents`.
        where: The data set's name in errors.
        progress: Takes messages for people.

    Raises:
        ConfigError: A tokenizer without a chat template that is needed; a wrong option.
        DataError: No example with a token to learn.
    """
    parts: list[Documents] = []
    noted: notes.Notes = {}
    chunks = encoder.encode(records)
    for done, examples in told(chunks, len(records), "examples", where, progress):
        parts.append(Documents.of(examples, max_seq_length, too_long))
        notes.add(noted, examples.noted, records[done:])
    documents = Documents.concatenate(parts)
    if not len(documents):
        raise DataError(nothing_to_learn(where, documents, max_seq_length, encoder.loss_on))
    return Encoded(documents, noted)


def told_time(
    tokenizer: "PreTrainedTokenizerFast", now: str | None, variables: dict[str, Any] | None
) -> tuple[str | None, dict[str, Any]]:
    """The time that a chat template tells in all rows, and its variables with the function that tells it.

    Args:
        tokenizer: The tokenizer, with the chat template.
        now: The time in ISO 8601; None: the present.
        variables: Of the chat template.

    Returns:
        The time; None: the template asks for none. And the variables.
    """
    if "strftime_now" not in str(tokenizer.chat_template):
        return None, variables or {}
    now = now or datetime.now().isoformat(timespec="seconds")
    return now, {"strftime_now": strftime_at(now), **(variables or {})}


def identity(opened: Iterable[OpenSource], tokenizer: "PreTrainedTokenizerFast", options: Any) -> str:
    """A fingerprint of everything that shapes prepared data, without preparing them.

    The date of a template that writes one is not part of it.

    Args:
        opened: The data sets.
        tokenizer: The tokenizer, with the chat template.
        options: Everything else, as JSON.

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
        "options": options,
    }
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:32]


def nothing_to_learn(where: str, documents: Documents, max_seq_length: int, loss_on: LossOn) -> str:
    """The message for data without a target token.

    Args:
        where: The data set.
        documents: Its documents, none, with their counts.
        max_seq_length: Tokens in a row.
        loss_on: The target tokens.
    """
    counts = documents.counts
    missing = (
        f"text behind {shown(loss_on[PARTS[1]], 80)}" if isinstance(loss_on, dict) else "response by the assistant"
    )
    dropped = f"; {counts.dropped:,} are longer and dropped" if counts.dropped else ""
    return (
        f"{where}: none of the {counts.examples:,} examples has a token to learn: no {missing} "
        f"within the first {max_seq_length:,} tokens{dropped}"
    )


def _dataset(rows: PackedRows, extra: dict[str, Any]) -> Dataset:
    statistics = DataStatistics(**extra["statistics"])
    return Dataset(rows, statistics, extra["fingerprint"], extra["max_token_id"], True, extra.get("now"))
