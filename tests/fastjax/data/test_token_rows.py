"""Rows of token ids: what is learnt of them is what their labels or masks say, and nothing is added."""

import numpy as np
import pytest

from fastjax.data import prepare
from fastjax.errors import DataError
from tests.support.data import uncached

IDS = [5, 6, 7, 8, 9]


def learnt(dataset):
    """(inputs, learnt targets) of each document."""
    documents = dataset.rows.documents
    spans = [slice(*documents.offsets[n : n + 2]) for n in range(len(documents))]
    return [(documents.tokens[s].tolist(), [t for t in documents.targets[s].tolist() if t >= 0]) for s in spans]


@pytest.mark.parametrize(
    ("columns", "loss_on", "expected"),
    [
        ({}, "responses", ([5, 6, 7, 8], [6, 7, 8, 9])),
        ({"labels": [-100, -100, 7, 8, -100]}, "all", ([5, 6, 7], [7, 8])),
        (
            {"labels": IDS, "assistant_masks": [0] * 5, "messages": [{"role": "user"}]},
            "responses",
            ([5, 6, 7, 8], IDS[1:]),
        ),
        ({"completion_mask": [0, 0, 0, 1, 1]}, "last_response", ([5, 6, 7, 8], [8, 9])),
        ({"completion_mask": [0, 0, 0, 1, 1]}, "all", ([5, 6, 7, 8], [6, 7, 8, 9])),
        (
            {"completion_mask": [0, 0, 0, 1, 1], "assistant_masks": [False, True, True, True, False]},
            "all",
            ([5, 6, 7], [6, 7, 8]),
        ),
        ({"attention_mask": [0, 1, 1, 1, 0], "labels": [-100, 6, 7, 8, 9]}, "responses", ([6, 7], [7, 8])),
        ({"position_ids": [0, 1, 2, 3, 4], "seq_lengths": [5]}, "responses", ([5, 6, 7, 8], [6, 7, 8, 9])),
    ],
)
def test_what_is_learnt(make_tokenizer, write_rows, columns, loss_on, expected):
    """From a file, and as arrays in memory; BOS and EOS are the row's own business."""
    tokenizer, row = make_tokenizer(None, adds_bos=True), {"input_ids": IDS, **columns}
    beside = {"text": "the user"}
    dataset = prepare(write_rows("a.jsonl", [row, beside]), tokenizer, 32, uncached(loss_on=loss_on))
    assert learnt(dataset)[0] == expected and tokenizer.decode(learnt(dataset)[1][0]) == "<s>the user"
    arrays = {name: value if name == "messages" else np.array(value) for name, value in row.items()}
    assert prepare([arrays, beside], tokenizer, 32, uncached(loss_on=loss_on)).fingerprint == dataset.fingerprint


def test_of_datasets_and_by_other_names(make_tokenizer, write_rows, tmp_path):
    from fastjax.data import DataSource

    datasets, tokenizer = pytest.importorskip("datasets"), make_tokenizer(None)
    rows = [{"input_ids": IDS[: n + 2], "labels": [-100, *IDS[1 : n + 2]]} for n in range(4)]
    expected = prepare(write_rows("a.jsonl", rows), tokenizer, 3, uncached(too_long="split")).fingerprint
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    for given in (table, table.with_format("numpy"), tmp_path / "a.parquet"):
        assert prepare(given, tokenizer, 3, uncached(too_long="split")).fingerprint == expected
    other = [{"ids": row["input_ids"], "wanted": row["labels"]} for row in rows]
    named = DataSource(str(write_rows("b.jsonl", other)), columns={"input_ids": "ids", "labels": "wanted"})
    assert prepare(named, tokenizer, 3, uncached(too_long="split")).fingerprint == expected


def test_other_numbers_in_memory_are_another_data_set(make_tokenizer, tmp_path):
    """Arrays too long for NumPy to print."""
    tokenizer = make_tokenizer(None)
    ids = np.arange(3000) % 50
    made = [
        prepare([{"input_ids": one}], tokenizer, 4096, uncached(cache_dir=str(tmp_path)))
        for one in (ids, np.roll(ids, 1))
    ]
    assert made[0].fingerprint != made[1].fingerprint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": "5 6"}, "'input_ids' must be a list of integers, found '5 6'"),
        ({"input_ids": [[5], [6, 7]]}, "'input_ids' must be a list of integers"),
        ({"input_ids": [5.0]}, "'input_ids' must be a list of integers"),
        ({"input_ids": [True]}, "'input_ids' must be a list of integers"),
        ({"input_ids": [5, 2**70]}, "'input_ids' must be a list of integers"),
        ({"input_ids": [5, -1]}, "'input_ids' must be token ids, found -1 to 5"),
        (
            {"labels": [6, 7, 8, 9, -100]},
            "'labels' must be those of 'input_ids' in the same places, or -100, found 6 for 5",
        ),
        ({"labels": [5]}, "'labels': expected 5 values, one for each token, found 1"),
        ({"attention_mask": [1, 0, 1, 1, 1]}, "'attention_mask': expected 0 at the ends alone"),
        ({"completion_mask": [0, 0, 0, 1, 2]}, "'completion_mask' must hold 0 and 1 alone, found 0 to 2"),
        ({"position_ids": [0, 1, 0, 1, 2]}, "'input_ids': expected one document, found several"),
        ({"seq_lengths": [2, 3]}, "'input_ids': expected one document, found several"),
    ],
)
def test_what_is_wrong_is_said(make_tokenizer, write_rows, row, message):
    path = write_rows("a.jsonl", [{"input_ids": IDS}, {"input_ids": IDS, **row}])
    with pytest.raises(DataError) as error:
        prepare(path, make_tokenizer(None), 32)
    assert str(error.value).startswith(f"{path}:2: ") and message in str(error.value)


def test_parts_are_searched_for_in_texts_alone(make_tokenizer):
    with pytest.raises(DataError, match="row 0: input_ids: expected loss_on responses or all, .* got instruction_part"):
        prepare(
            [{"input_ids": IDS}],
            make_tokenizer(None),
            32,
            uncached(loss_on={"instruction_part": "a", "response_part": "b"}),
        )
