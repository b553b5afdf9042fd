"""Answers in packed rows: pairs stay together, and every document keeps its role."""

import numpy as np
import pytest

from fastjax.data.batches import batch_of
from fastjax.data.preferences import Answer, Role, pack_preferences, with_reference

PAIR = [Answer([1, 2, 3], [4, 5], Role.CHOSEN), Answer([1, 2, 3], [6], Role.REJECTED)]
OTHER = [Answer([7], [8, 9, 10], Role.CHOSEN), Answer([7], [11], Role.REJECTED)]
ALONE = [Answer([12, 13], [14, 15, 16, 17, 18, 19, 20, 21], Role.MISMATCHED)]


def test_pairs_share_a_row():
    rows = pack_preferences([PAIR, ALONE, OTHER], 12)
    known = np.asarray([[1, 2, 4, 5], [3, 0, 0, 0]], np.float32)
    batch = batch_of(with_reference(rows, known), np.asarray([[0, -1], [1, 0]]))
    assert len(rows) == 2 and rows.documents_per_row == 4
    np.testing.assert_array_equal(batch.tokens[0, 0], [1, 2, 3, 4, 1, 2, 3, 7, 8, 9, 7, 0])
    np.testing.assert_array_equal(batch.targets[0, 0], [-100, -100, 4, 5, -100, -100, 6, 8, 9, 10, 11, -100])
    np.testing.assert_array_equal(batch.segment_ids[0, 0], [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 0])
    np.testing.assert_array_equal(batch.positions[0, 0], [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 0])
    np.testing.assert_array_equal(batch.extra["roles"], [[[1, 2, 1, 2], [0] * 4], [[3, 0, 0, 0], [1, 2, 1, 2]]])
    found = batch.extra["reference_log_probs"]
    np.testing.assert_array_equal(found, [[known[0], [0] * 4], [known[1], known[0]]])
    assert "reference_log_probs" not in batch_of(rows, np.asarray([[0]])).extra


@pytest.mark.parametrize(
    "groups, message",
    [
        ([], "groups: expected at least one, got none"),
        ([PAIR, [Answer([1], [], Role.CHOSEN)]], "answer 2: expected at least one token .* got 1 and 0"),
        ([PAIR, ALONE, []], "group 2: expected 1 to 9 tokens, as a row has, got 0"),
        ([ALONE, OTHER, [*PAIR, *OTHER]], "group 2: expected 1 to 9 tokens, as a row has, got 11"),
    ],
)
def test_what_does_not_fit_a_row_is_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        pack_preferences(groups, 9)
