import itertools
import json
import threading

import numpy as np
import pytest

from fastjax.data import DataSource, Prefetched, StreamedBatches, streaming
from fastjax.data.batches import BatchSource
from fastjax.errors import DataError

LENGTH = 24


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Windows of a few rows, so that a test goes over many."""
    monkeypatch.setattr(streaming, "WINDOW", 6)
    monkeypatch.setattr(streaming, "_READ", 4)


@pytest.fixture
def files(write_rows):
    return [
        write_rows(f"{name}.jsonl", [{"text": f"{name} {n} " + "the user " * (n % 5)} for n in range(count)])
        for name, count in (("a", 23), ("b", 9))
    ]


@pytest.fixture
def batches(files, make_tokenizer):
    tokenizer = make_tokenizer(None, adds_bos=True)

    def make(sources=files, batch_size=2, accumulation_steps=1, **options):
        return StreamedBatches(sources, tokenizer, LENGTH, batch_size, accumulation_steps, seed=3, **options)

    make.decode = tokenizer.decode
    return make


def flat(made):
    return [np.stack(batch[:4]).reshape(4, -1, LENGTH) for batch in made]


def texts(batches, made):
    """The documents of batches, in order."""
    found = []
    for batch in made:
        for tokens, segments in zip(
            batch.tokens.reshape(-1, LENGTH), batch.segment_ids.reshape(-1, LENGTH), strict=True
        ):
            found += [batches.decode(tokens[segments == s]).removeprefix("<s>") for s in range(1, segments.max() + 1)]
    return [" ".join(text.split()[:2]) for text in found]


def test_a_stream_is_the_same_every_time_and_however_it_is_divided(batches):
    once = np.concatenate(flat(batches(batch_size=8).from_step(0, 6)), axis=1)
    for size, accumulation in ((8, 1), (4, 2), (1, 8)):
        again = batches(batch_size=size, accumulation_steps=accumulation)
        made = list(again.from_step(0, 6))
        assert made[0].tokens.shape == (accumulation, size, LENGTH) and made[0].tokens.dtype == np.int32
        np.testing.assert_array_equal(np.concatenate(flat(made), axis=1), once)
    source: BatchSource = again
    assert source.steps_per_epoch is None and len(again.fingerprint) == 32
    assert not [thread for thread in threading.enumerate() if thread.name == "fastjax-prefetch"]


def test_every_example_comes_once_before_any_comes_again(batches, files):
    found = texts(batches, itertools.islice(batches(batch_size=1).from_step(), 60))
    counts = {text: found.count(text) for text in found}
    assert set(counts) == {f"a {n}" for n in range(23)} | {f"b {n}" for n in range(9)}
    # Only a window mixes the end of one pass with the beginning of the next.
    assert max(counts.values()) - min(counts.values()) <= 2


def test_a_stream_goes_on_from_a_position(batches):
    whole = batches(batch_size=3)
    made, positions, numbers = [], [], []
    with Prefetched(whole.from_step(0, 25), depth=2) as ahead:
        for step, batch in enumerate(ahead):
            made.append(batch)
            numbers.append(whole.row_numbers(step))
            positions.append(json.loads(json.dumps(whole.position(step + 1))))
    for step in (1, 2, 7, 13, 24):
        resumed = batches(batch_size=3)
        rest = list(resumed.from_step(step, 25, positions[step - 1]))
        for batch, expected in zip(rest, made[step:], strict=True):
            np.testing.assert_array_equal(np.stack(batch[:4]), np.stack(expected[:4]))
        np.testing.assert_array_equal(resumed.row_numbers(24), numbers[24])
        assert resumed.position(step) == positions[step - 1]
        np.testing.assert_array_equal(flat(batches(batch_size=3).from_step(24, 25))[0], flat(made)[24])
    with pytest.raises(ValueError, match="after step 99 is not known"):
        whole.position(99)


def test_weights_share_out_the_examples(batches, files):
    sources = [DataSource(str(file), weight=weight) for file, weight in zip(files, (1.0, 3.0), strict=True)]
    made = batches(sources, batch_size=4)
    found = texts(batches, made.from_step(0, 15))
    assert sum(text.startswith("b") for text in found) == pytest.approx(0.75 * len(found), abs=4)
    # The longer one goes on where the shorter one begins again.
    assert {text for text in found if text.startswith("a")} == {f"a {n}" for n in range(23)}
    resumed = batches(sources, batch_size=4).from_step(10, 15, made.position(10))
    np.testing.assert_array_equal(flat(resumed), flat(batches(sources, batch_size=4).from_step(10, 15)))


def test_rows_are_named(batches, files):
    made = batches(batch_size=1)
    (batch,) = made.from_step(0, 1)
    (text,) = texts(batches, [batch])[:1]
    name, number = text.split()
    described = made.describe_rows(made.row_numbers(0))
    assert f"{name}.jsonl:{int(number) + 1}" in described and described.startswith(f"row {made.row_numbers(0)[0, 0]} (")


def test_what_cannot_be_streamed_is_said(batches, write_rows):
    empty = write_rows("empty.jsonl", [])
    with pytest.raises(DataError, match="empty.jsonl: no examples"):
        next(batches(empty).from_step())
    nothing = write_rows("nothing.jsonl", [{"text": ""}] * 9)
    with pytest.raises(DataError, match="nothing.jsonl: none of the .* examples has a token to learn"):
        next(batches(nothing).from_step())
    broken = write_rows("broken.jsonl", [{"text": "fine"}] * 3 + [3])
    with pytest.raises(DataError, match="broken.jsonl:4: expected an object"):
        next(batches(broken).from_step())
    with pytest.raises(FileNotFoundError):
        batches("none.jsonl")
