import itertools

import numpy as np
import pytest

from fastjax.data import Batches, pack_documents
from fastjax.data.batches import BatchSource
from fastjax.data.documents import Documents


@pytest.fixture
def rows(make_examples):
    """Seven rows of one document each; row n holds the token n + 1."""
    examples = make_examples([([n] * 4, [0, 1, 1, 1]) for n in range(1, 8)])
    return pack_documents(Documents.of(examples, 4), 4, packing=False)


def firsts(batches):
    return [int(token) for batch in batches for token in batch.tokens[:, :, 0].ravel()]


def test_an_epoch_has_every_row_once_and_ends_in_padding(rows):
    batches = Batches(rows, batch_size=2, accumulation_steps=2, seed=3)
    assert batches.steps_per_epoch == 2
    epoch = list(batches.epoch())
    assert epoch[0].tokens.shape == (2, 2, 4) and epoch[0].tokens.dtype == np.int32
    assert sorted(firsts(epoch)) == [0, 1, 2, 3, 4, 5, 6, 7]
    last = epoch[1]
    assert (last.targets[1, 1] == -100).all() and (last.segment_ids[1, 1] == 0).all()
    assert (last.targets[0] != -100).sum() == 6


def test_order_depends_on_seed_and_epoch_alone(rows):
    batches = Batches(rows, batch_size=2, seed=3)
    first, again, second = firsts(batches.epoch(0)), firsts(batches.epoch(0)), firsts(batches.epoch(1))
    assert first == again != second
    assert firsts(Batches(rows, batch_size=2, seed=4).epoch(0)) != first
    assert firsts(Batches(rows, batch_size=2, shuffle=False).epoch(5)) == [1, 2, 3, 4, 5, 6, 7, 0]


def test_accumulation_splits_the_same_rows(rows):
    for step in range(4):
        wide = Batches(rows, batch_size=4, seed=1).batch(step)
        deep = Batches(rows, batch_size=1, accumulation_steps=4, seed=1).batch(step)
        np.testing.assert_array_equal(wide.tokens.reshape(-1, 4), deep.tokens.reshape(-1, 4))


def test_rows_of_a_step_are_named(rows):
    batches = Batches(rows, batch_size=2, accumulation_steps=2, shuffle=False)
    assert batches.row_numbers(1).tolist() == [[4, 5], [6, -1]]
    assert batches.describe_rows(batches.row_numbers(1)) == "row 4 (example 4); row 5 (example 5); row 6 (example 6)"
    shuffled = Batches(rows, batch_size=4, seed=3)
    assert (shuffled.batch(1).tokens[..., 0] == shuffled.row_numbers(1) + 1).all()
    assert shuffled.position(1) == {}
    source: BatchSource = shuffled
    assert source.steps_per_epoch == 2


def test_a_run_goes_on_where_it_stopped(rows):
    batches = Batches(rows, batch_size=2, seed=3)
    assert firsts(batches.from_step(0, 9)) == firsts(batches.from_step(0, 5)) + firsts(batches.from_step(5, 9))
    endless = list(itertools.islice(batches.from_step(6), 3))
    assert firsts(endless) == firsts(batches.from_step(6, 9))
