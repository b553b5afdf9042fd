import numpy as np
import pytest

from fastjax.data import Batches, pack_documents
from fastjax.data.batches import BatchSource
from fastjax.data.documents import Documents
from fastjax.data.grouping import ByLength
from fastjax.data.lengths import chosen_lengths, ladder, streamed_lengths

ROW = 1000
COUNT = 107


@pytest.fixture
def rows(make_examples):
    """Rows of one document each, between 2 and 1,000 tokens long."""
    lengths = np.random.default_rng(0).integers(2, ROW, COUNT - 1, endpoint=True).tolist() + [ROW]
    examples = make_examples([([n] * length, [0, *[1] * (length - 1)]) for n, length in enumerate(lengths, start=1)])
    return pack_documents(Documents.of(examples, ROW), ROW, packing=False)


def grouped(rows, batch_size=2, accumulation_steps=2, seed=3):
    return Batches(rows, batch_size, accumulation_steps, seed=seed, by_length=ByLength(rows.lengths))


def numbers(batches, epoch):
    steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
    return [batches.row_numbers(step).ravel().tolist() for step in steps]


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(rows):
    source: BatchSource = grouped(rows)
    first, second = (numbers(source, epoch) for epoch in (0, 1))
    for epoch in (first, second):
        assert sorted(sum(epoch, [])) == [-1, *range(COUNT)] and epoch[-1][-1] == -1
    assert first != second and first == numbers(grouped(rows), 0) != numbers(grouped(rows, seed=4), 0)
    wide = numbers(grouped(rows, batch_size=4, accumulation_steps=1), 0)
    assert wide == first


def test_rows_of_a_batch_are_of_similar_length(rows):
    lengths = rows.lengths
    spread = {
        name: np.mean([np.ptp(lengths[step]) for step in numbers(batches, 0)[:-1]])
        for name, batches in (("grouped", grouped(rows)), ("shuffled", Batches(rows, 4, seed=3)))
    }
    assert spread["grouped"] < 0.1 * spread["shuffled"]


@pytest.mark.parametrize("kind", ["grouped", "shuffled", "pairs"])
def test_a_batch_is_its_rows_without_the_padding_of_all(rows, make_examples, kind):
    if kind == "pairs":
        rows = pack_documents(rows.documents, 2 * ROW, packing=False, starts=np.arange(0, COUNT + 1, 2)[: COUNT // 2])
    whole = grouped(rows) if kind == "grouped" else Batches(rows, 2, 2, seed=3)
    steps, multiple = 12 * whole.steps_per_epoch, 4
    batches, seen = whole.shortened(steps, multiple), []
    for step, (batch, uncut) in enumerate(zip(batches.from_step(0, steps), whole.from_step(0), strict=False)):
        length = batch.tokens.shape[-1]
        assert batch.tokens.shape == (2, 2, length) and length in batches.lengths and not length % multiple
        np.testing.assert_array_equal(batches.row_numbers(step), whole.row_numbers(step))
        shorter = [one for one in batches.lengths if one < length]
        assert not uncut.segment_ids[..., length:].any() and uncut.segment_ids[..., max(shorter, default=0) :].any()
        for one, other in zip(batch[:4], uncut[:4], strict=True):
            np.testing.assert_array_equal(one, other[..., :length])
        seen.append(((batch.segment_ids != 0).mean(), length))
    assert {length for _, length in seen} == {*batches.lengths} and 1 < len(batches.lengths) <= 8
    filled = np.average([share for share, _ in seen], weights=[length for _, length in seen])
    np.testing.assert_allclose(batches.slots_filled(steps), filled)


def test_lengths_are_few_and_pay():
    assert ladder(1000) == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000]
    assert ladder(96, 6) == [36, 48, 66, 96] and ladder(8) == [8]
    assert streamed_lengths(2048) == (256, 512, 1024, 2048) and streamed_lengths(40) == (40,)
    short, long = np.full(40, 30), np.array([700])
    assert chosen_lengths(long, 2048) == (768,)  # nothing is computed behind the longest row of the run
    assert chosen_lengths(np.append(short[:8], long), 2048) == (768,)
    assert chosen_lengths(np.append(short, long), 2048) == (32, 768)
    assert chosen_lengths(np.append(short, [700, 1900]), 2048) == (32, 2048)
    many = chosen_lengths(np.repeat(ladder(4096), 1000), 4096)
    assert len(many) == 8 and many[0] == 128 and many[-1] == 4096


def test_a_resumed_run_keeps_its_lengths(rows):
    batches = grouped(rows)
    begun = batches.shortened(20)
    kept = tuple(begun.position(7)["lengths"])
    again = batches.shortened(400, before=kept)
    assert batches.shortened(400).lengths != kept == begun.lengths
    assert again.lengths in (kept, (*kept, ROW))
    for ours, theirs in zip(again.from_step(10, 20), list(begun.from_step(0, 20))[10:], strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
