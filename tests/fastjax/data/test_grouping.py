import numpy as np
import pytest

from fastjax.data import Batches, pack_documents
from fastjax.data.batches import BatchSource
from fastjax.data.documents import Documents
from fastjax.data.grouping import ByLength

ROW = 1000
COUNT = 107


@pytest.fixture
def rows(make_examples):
    """Rows of one document each, between 2 and 1,000 tokens long."""
    lengths = np.random.default_rng(0).integers(2, ROW, COUNT - 1, endpoint=True).tolist() + [ROW]
    examples = make_examples([([n] * length, [0, *[1] * (length - 1)]) for n, length in enumerate(lengths, start=1)])
    return pack_documents(Documents.of(examples, ROW), ROW, packing=False)


def grouped(rows, batch_size=2, accumulation_steps=2, seed=3):
    return Batches(rows, batch_size, accumulation_steps, seed=seed, by_length=ByLength(rows))


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
    lengths = rows.documents.lengths
    spread = {
        name: np.mean([np.ptp(lengths[step]) for step in numbers(batches, 0)[:-1]])
        for name, batches in (("grouped", grouped(rows)), ("shuffled", Batches(rows, 4, seed=3)))
    }
    assert spread["grouped"] < 0.1 * spread["shuffled"]


def test_a_batch_is_its_rows_without_the_padding_of_all(rows):
    batches, seen = grouped(rows), set()
    for step, batch in enumerate(batches.from_step(0, batches.steps_per_epoch)):
        whole = rows.rows(batches.row_numbers(step).ravel())
        length = batch.tokens.shape[-1]
        seen.add(length)
        assert batch.tokens.shape == (2, 2, length) and not whole.segment_ids[:, length:].any()
        assert not length % 128 or length == ROW
        for cut, uncut in zip(batch[:4], whole, strict=True):
            np.testing.assert_array_equal(cut.reshape(4, length), uncut[:, :length])
        if length > 128:
            assert whole.segment_ids[:, length - 128 :].any()
    assert ROW in seen and 4 < len(seen) <= 8


def test_a_run_goes_on_in_the_middle_of_an_epoch(rows):
    batches = grouped(rows)
    for ours, theirs in zip(batches.from_step(20, 30), list(grouped(rows).from_step(0, 30))[20:], strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
