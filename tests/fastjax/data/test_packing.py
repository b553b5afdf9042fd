import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastjax.data import DataOptions, pack_documents
from fastjax.data.dataset import DataStatistics
from fastjax.data.documents import Counts, Documents
from fastjax.data.packing import Origins, best_fit
from fastjax.errors import ConfigError

EXAMPLES = [
    ([10, 11, 12, 13, 14], [0, 0, 1, 1, 0]),  # 3 tokens: the last two serve nothing
    ([20, 21, 22, 23, 24, 25, 26], [0, 1, 1, 1, 1, 1, 1]),  # one too long for 5
    ([30, 31], [0, 0]),  # nothing to learn
    ([40, 41], [0, 1]),
    ([50, 51, 52, 53, 54, 55, 56], [0, 0, 0, 0, 0, 0, 1]),  # nothing left once cut
]


def test_documents_are_shifted_cut_and_counted(make_examples):
    documents = Documents.of(make_examples(EXAMPLES), 5)
    assert documents.tokens.tolist() == [10, 11, 12, 20, 21, 22, 23, 24, 40]
    assert documents.targets.tolist() == [-100, 12, 13, 21, 22, 23, 24, 25, 41]
    assert documents.offsets.tolist() == [0, 3, 8, 9]
    assert documents.examples.tolist() == [0, 1, 3]
    assert documents.counts == Counts(examples=5, truncated=1, no_targets=2)
    assert documents.tokens.dtype == documents.targets.dtype == np.int32


def test_too_long_examples_are_split(make_examples):
    documents = Documents.of(make_examples(EXAMPLES), 3, "split")
    pieces = [documents.tokens[a:b].tolist() for a, b in itertools.pairwise(documents.offsets)]
    # Of the fifth example, 50 51 52 has nothing to learn.
    assert pieces == [[10, 11, 12], [20, 21, 22], [23, 24, 25], [40], [53, 54, 55]]
    assert documents.targets.tolist() == [-100, 12, 13, 21, 22, 23, 24, 25, 26, 41, -100, -100, 56]
    assert documents.examples.tolist() == [0, 1, 1, 3, 4]
    assert documents.counts == Counts(examples=5, split=2, no_targets=1)
    assert pack_documents(documents, 3).rows([2]).positions.tolist() == [[0, 1, 2]]


def test_too_long_examples_are_dropped(make_examples):
    documents = Documents.of(make_examples(EXAMPLES), 5, "drop")
    assert documents.examples.tolist() == [0, 3]
    assert documents.counts == Counts(examples=5, dropped=2, no_targets=1)
    with pytest.raises(ConfigError, match="data.too_long: expected one of truncate, split, drop, got 'cut'"):
        DataOptions(too_long="cut")


@pytest.mark.parametrize("too_long", ["truncate", "split", "drop"])
def test_documents_of_parts_are_those_of_the_whole(make_examples, too_long):
    parts = [Documents.of(make_examples(some), 4, too_long) for some in (EXAMPLES[:2], [], EXAMPLES[2:])]
    whole = Documents.of(make_examples(EXAMPLES), 4, too_long)
    for joined, expected in zip(Documents.concatenate(parts), whole, strict=True):
        np.testing.assert_array_equal(joined, expected)


def test_chosen_documents_are_packed_as_often_as_they_come(make_examples):
    origins = Origins.of([f"a.jsonl:{n}" for n in range(5)])
    documents = Documents.of(make_examples(EXAMPLES), 5)
    rows = pack_documents(documents, 5, chosen=np.array([0, 2, 2, 2]), origins=origins)
    assert [rows.members(row) for row in range(len(rows))] == [[0, 2, 2], [2]]
    assert rows.describe(0) == "a.jsonl:0, 3" and rows.describe(0, most=1) == "a.jsonl:0 and 1 more"
    assert pack_documents(documents, 5).describe(1) == "example 1"


@given(st.lists(st.sampled_from(["a:1", "a:12", "b row 0", "x", "007", "", "12", "9" * 30])))
def test_origins_give_names_back(names):
    origins = Origins.of(names)
    assert [origins.name(n) for n in range(len(names))] == names


def test_no_document_at_all(make_examples):
    documents = Documents.of(make_examples([]), 5)
    assert len(documents) == 0 and len(pack_documents(documents, 5)) == 0


def test_packed_rows(make_examples):
    rows = pack_documents(Documents.of(make_examples(EXAMPLES), 5), 5)
    assert [rows.members(row) for row in range(-1, 3)] == [[], [0, 2], [1], []]
    tokens, targets, segment_ids, positions = rows.rows([0, -1, 1])
    assert tokens.tolist() == [[10, 11, 12, 40, 0], [0] * 5, [20, 21, 22, 23, 24]]
    assert targets.tolist() == [[-100, 12, 13, 41, -100], [-100] * 5, [21, 22, 23, 24, 25]]
    assert segment_ids.tolist() == [[1, 1, 1, 2, 0], [0] * 5, [1] * 5]
    assert positions.tolist() == [[0, 1, 2, 0, 0], [0] * 5, [0, 1, 2, 3, 4]]
    assert {array.dtype for array in (tokens, targets, segment_ids, positions)} == {np.dtype(np.int32)}


def test_padded_rows(make_examples):
    rows = pack_documents(Documents.of(make_examples(EXAMPLES), 5), 5, packing=False)
    assert [rows.members(row) for row in range(3)] == [[0], [1], [2]]
    assert rows.rows([2]).segment_ids.tolist() == [[1, 0, 0, 0, 0]]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_best_fit_loses_nothing_overfills_nothing_and_wastes_little(case):
    capacity, lengths = case
    bins = best_fit(lengths, capacity)
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    filled = [sum(lengths[item] for item in members) for members in bins]
    assert all(total <= capacity for total in filled)
    # No two bins could be one, or best fit would have made them one.
    assert len(filled) < 2 or sum(sorted(filled)[:2]) > capacity


def test_best_fit_fills_rows_of_natural_lengths():
    lengths = np.random.default_rng(0).lognormal(5, 0.6, 100_000).astype(int).clip(1, 2048)
    assert len(best_fit(lengths, 2048)) <= 1.002 * -(-lengths.sum() // 2048)


def test_best_fit_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="from 1 to 8, got 3 to 9"):
        best_fit([3, 9], 8)


def test_statistics_read_as_a_line():
    statistics = DataStatistics(10, 8, 1, 0, 0, 2, 900, 300, 2, 1000)
    assert str(statistics) == (
        "8 examples in 2 rows; 900 tokens, 300 of them learnt; 1 truncated; 2 left out: nothing to learn in them"
    )
    assert "8 documents in" in str(statistics._replace(split=3, truncated=0, dropped=4))
    assert "; 3 too long, split; 4 too long, dropped; " in str(statistics._replace(split=3, truncated=0, dropped=4))
