import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastjax.data import DataStatistics, Documents, pack_documents
from fastjax.data.encoding import Example
from fastjax.data.packing import best_fit


def example(tokens, learn):
    return Example(np.asarray(tokens, np.int32), np.asarray(learn, bool))


EXAMPLES = [
    example([10, 11, 12, 13, 14], [0, 0, 1, 1, 0]),  # 3 tokens: the last two serve nothing
    example([20, 21, 22, 23, 24, 25, 26], [0, 1, 1, 1, 1, 1, 1]),  # one too long for 5
    example([30, 31], [0, 0]),  # nothing to learn
    example([40, 41], [0, 1]),
    example([50, 51, 52, 53, 54, 55, 56], [0, 0, 0, 0, 0, 0, 1]),  # nothing left once cut
]


def test_documents_are_shifted_cut_and_counted():
    documents = Documents.from_examples(EXAMPLES, 5)
    assert documents.tokens.tolist() == [10, 11, 12, 20, 21, 22, 23, 24, 40]
    assert documents.targets.tolist() == [-100, 12, 13, 21, 22, 23, 24, 25, 41]
    assert documents.offsets.tolist() == [0, 3, 8, 9]
    assert (documents.truncated, documents.no_targets) == (1, 2)
    assert documents.tokens.dtype == documents.targets.dtype == np.int32


def test_no_document_at_all():
    documents = Documents.from_examples([], 5)
    assert len(documents) == 0 and len(pack_documents(documents, 5)) == 0


def test_packed_rows():
    rows = pack_documents(Documents.from_examples(EXAMPLES, 5), 5)
    assert rows.members == [[0, 2], [1]]
    tokens, targets, segment_ids, positions = rows.rows([0, -1, 1])
    assert tokens.tolist() == [[10, 11, 12, 40, 0], [0] * 5, [20, 21, 22, 23, 24]]
    assert targets.tolist() == [[-100, 12, 13, 41, -100], [-100] * 5, [21, 22, 23, 24, 25]]
    assert segment_ids.tolist() == [[1, 1, 1, 2, 0], [0] * 5, [1] * 5]
    assert positions.tolist() == [[0, 1, 2, 0, 0], [0] * 5, [0, 1, 2, 3, 4]]
    assert {array.dtype for array in (tokens, targets, segment_ids, positions)} == {np.dtype(np.int32)}


def test_padded_rows():
    rows = pack_documents(Documents.from_examples(EXAMPLES, 5), 5, packing=False)
    assert rows.members == [[0], [1], [2]]
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
    with pytest.raises(ValueError, match="from 1 to 8, given 3 to 9"):
        best_fit([3, 9], 8)


def test_statistics_read_as_a_line():
    statistics = DataStatistics(10, 8, 1, 2, 900, 300, 2, 1000)
    assert statistics.slots_filled == 0.9
    assert str(statistics) == (
        "8 examples in 2 rows; 900 tokens, 300 of them learnt; 90.0% of the slots filled; 1 truncated; "
        "2 left out: nothing to learn in them"
    )
