"""Rows of preferences from files: groups that fit, what is cut, left out, kept in the cache."""

import numpy as np
import pytest

from fastjax.data import Batches, notes, prepare
from fastjax.data.preference_groups import _common_length
from fastjax.data.preferences import Role
from fastjax.errors import ConfigError, DataError
from tests.support.data import uncached

PAIRED, UNPAIRED = ("paired", None), ("unpaired", None)


def pair(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def documents(rows):
    """(text, scored text, role) of each document, row by row."""
    found, roles = rows.documents, rows.fields["roles"]
    return [[(one, Role(int(roles[one]))) for one in rows.members(row)] for row in range(len(rows))], found


@pytest.fixture
def tokenizer(make_tokenizer):
    """A letter is a token, unless it is of a common word."""
    return make_tokenizer(adds_bos=True)


def shown(tokenizer, found, document):
    span = slice(*found.offsets[document : document + 2])
    tokens, targets = found.tokens[span], found.targets[span]
    return tokenizer.decode(tokens), tokenizer.decode(targets[targets >= 0])


def test_pairs_and_their_cache(tokenizer, write_rows, tmp_path):
    path = write_rows("a.jsonl", [pair("xx ", "qq", "zzz"), pair("yy ", "kkkk", ""), pair("ww ", "ggg", "jj")])
    arguments = {"tokenizer": tokenizer, "max_seq_length": 40, "preferences": PAIRED}
    kept = {"cache_dir": str(tmp_path / "cache")}
    arguments["options"] = uncached(**kept)
    made, again = (prepare(path, **arguments) for _ in range(2))
    assert again.from_cache and again.fingerprint == made.fingerprint
    for dataset in (made, again):
        rows, found = documents(dataset.rows)
        assert [[role for _, role in row] for row in rows] == [[Role.CHOSEN, Role.REJECTED] * 3]
        assert [shown(tokenizer, found, one) for one, _ in rows[0]] == [
            ("<s>xx qq", "qq</s>"),
            ("<s>xx zzz", "zzz</s>"),
            ("<s>yy kkkk", "kkkk</s>"),
            ("<s>yy ", "</s>"),
            ("<s>ww ggg", "ggg</s>"),
            ("<s>ww jj", "jj</s>"),
        ]
        batch = Batches(dataset.rows, 1).batch(0)
        np.testing.assert_array_equal(batch.extra["roles"], [[[1, 2] * 3]])
        assert dataset.rows.describe(0) == f"{path}:1, 2, 3"
    assert str(made.statistics).startswith("6 documents of 3 examples in 1 rows; ")
    alone = prepare(path, **arguments | {"options": uncached(**kept, packing=False)})
    assert len(alone.rows) == 3 and alone.fingerprint != made.fingerprint
    single = prepare(path, **arguments | {"preferences": UNPAIRED})
    assert single.statistics.documents == 12 and single.fingerprint != made.fingerprint


def test_ranked_pairs_keep_their_last_token(tokenizer, write_rows, tmp_path):
    path = write_rows("a.jsonl", [pair("xx ", "qqq", "zzz") | {"margin": 0.5}, pair("yy ", "kkkk", "k")])
    cache = {"cache_dir": str(tmp_path / "cache")}
    arguments = {"tokenizer": tokenizer, "options": uncached(**cache, too_long="drop")}
    for dataset in [prepare(path, max_seq_length=40, preferences=("ranked", None), **arguments) for _ in range(2)]:
        ((*row,),), found = documents(dataset.rows)
        assert [role for _, role in row] == [Role.CHOSEN, Role.REJECTED] * 2
        assert [shown(tokenizer, found, one) for one, _ in row] == [
            ("<s>xx qqq</s>", "qqq</s>"),
            ("<s>xx zzz</s>", "zzz</s>"),
            ("<s>yy kkkk</s>", "kkkk</s>"),
            ("<s>yy k</s>", "k</s>"),
        ]
        batch = Batches(dataset.rows, 1).batch(0)
        np.testing.assert_array_equal(batch.extra["margins"], np.float32([[[0.5, 0.5, 0, 0]]]))
    lengths = sorted(int(length) for length in dataset.rows.documents.lengths)
    for limit, kept in ((lengths[-1], 2), (lengths[-1] - 1, 1)):
        fitted = prepare(path, max_seq_length=40, preferences=("ranked", limit), **arguments)
        assert len(fitted.rows.documents) == 2 * kept and fitted.statistics.dropped == 2 - kept
    longest = max(int(dataset.rows.documents.lengths[n : n + 2].sum()) for n in (0, 2))
    arguments["options"] = uncached(**cache)
    cut = prepare(path, max_seq_length=longest - 1, preferences=("ranked", None), **arguments)
    assert cut.statistics.truncated == 1 and sorted(cut.rows.documents.lengths) == [
        lengths[0],
        *[longest // 2 - 1] * 2,
        lengths[-1],
    ]


def test_prompts_and_answers_have_greatest_lengths(tokenizer, write_rows):
    """A prompt keeps its end, an answer its beginning."""
    path = write_rows("a.jsonl", [pair("abcdef ", "qqqqqqq", "z")])
    ((*row,),), found = documents(prepare(path, tokenizer, 60, preferences=("paired", None, 3, 2)).rows)
    assert [shown(tokenizer, found, one) for one, _ in row] == [("ef q", "qq"), ("ef z", "z</s>")]


def test_single_answers_take_the_completion_before(tokenizer, write_rows):
    rows = [{"prompt": f"{c}{c} ", "completion": c * n, "label": n > 2} for c, n in (("x", 2), ("z", 3), ("q", 4))]
    dataset = prepare(write_rows("a.jsonl", rows), tokenizer, 20, preferences=UNPAIRED)
    found, texts = documents(dataset.rows)
    told = {shown(tokenizer, texts, one): role for row in found for one, role in row}
    assert told == {
        ("<s>xx xx", "xx</s>"): Role.REJECTED,
        ("<s>xx qqqq", "qqqq</s>"): Role.MISMATCHED,
        ("<s>zz zzz", "zzz</s>"): Role.CHOSEN,
        ("<s>zz xx", "xx</s>"): Role.MISMATCHED,
        ("<s>qq qqqq", "qqqq</s>"): Role.CHOSEN,
        ("<s>qq zzz", "zzz</s>"): Role.MISMATCHED,
    }
    for row in found:  # each with its own beside it
        assert [role for _, role in row][1::2] == [Role.MISMATCHED] * (len(row) // 2)
    with pytest.raises(DataError, match="b.jsonl: expected at least two answers, .* got 1"):
        prepare(write_rows("b.jsonl", rows[:1]), tokenizer, 20, preferences=UNPAIRED)


@pytest.mark.parametrize("max_length, too_long, lengths", [(None, "truncate", [13, 7]), (9, "truncate", [8, 7])])
def test_a_pair_longer_than_a_row(tokenizer, write_rows, max_length, too_long, lengths):
    """The longest document is cut; of max_length tokens the last is only predicted."""
    path = write_rows("a.jsonl", [pair("xx ", "q" * 30, "zzz"), pair("x" * 30, "q", "z"), pair("xx ", "q", "z")])
    arguments = {"tokenizer": tokenizer, "max_seq_length": 20, "preferences": ("paired", max_length)}
    cut = prepare(path, options=uncached(too_long=too_long), **arguments)
    assert (cut.statistics.truncated, cut.statistics.no_targets) == (1, 1)
    assert cut.rows.documents.lengths.tolist() == [*lengths, 5, 5]
    dropped = prepare(path, options=uncached(too_long="drop"), **arguments)
    assert (dropped.statistics.dropped, dropped.statistics.examples, dropped.statistics.documents) == (2, 3, 2)
    with pytest.raises(DataError, match=r"a.jsonl: none of the 3 examples has answers .* 3 have nothing left to score"):
        prepare(path, tokenizer, 6, preferences=("paired", 4))
    with pytest.raises(ConfigError, match="data.too_long: expected truncate or drop with preferences.loss, got split"):
        prepare(path, tokenizer, 6, uncached(too_long="split"), preferences=PAIRED)


def test_pairs_that_say_nothing_and_answers_of_one_kind_are_counted(tokenizer, write_rows):
    """The second is the same once cut."""
    path = write_rows("a.jsonl", [pair("xx ", "q", "q"), pair("y ", "q" * 30, "q" * 31), pair("xx ", "q", "z")])
    found = prepare(path, tokenizer, 20, preferences=PAIRED)
    told = f"2 {notes.KINDS[notes.IDENTICAL]} (first: {path}:1)"
    assert told in str(found.statistics) and "desirable" not in str(found.statistics)
    assert found.statistics.documents == 6
    single = prepare(path, tokenizer, 80, preferences=UNPAIRED).statistics
    assert (single.notes, single.desirable, single.undesirable) == ({notes.IDENTICAL: (1, f"{path}:1")}, 3, 3)
    for label, said in (
        (True, "3 answers desirable, 0 undesirable: none is undesirable, and kto learns from the"),
        (False, "0 answers desirable, 3 undesirable: none is desirable, and kto"),
    ):
        path = write_rows("b.jsonl", [{"prompt": "x ", "completion": "q" * n, "label": label} for n in (1, 2, 3)])
        assert said in str(prepare(path, tokenizer, 20, preferences=UNPAIRED).statistics)


def test_weights_repeat_pairs(tokenizer, write_rows):
    from fastjax.data import DataSource

    few = write_rows("few.jsonl", [pair("xx ", "q", "z"), pair("", "", "z")])
    many = write_rows("many.jsonl", [pair("yy ", "q" * n, "z") for n in range(1, 5)])
    sources = [DataSource(str(few), weight=1.0), DataSource(str(many), weight=1.0)]
    dataset = prepare(sources, tokenizer, 40, uncached(mixture_ends="all_exhausted"), preferences=PAIRED)
    rows, _ = documents(dataset.rows)
    told = [role for row in rows for _, role in row]
    assert dataset.statistics.examples == 8 and told == [Role.CHOSEN, Role.REJECTED] * (len(told) // 2)
    assert len(dataset.rows.order) > len(dataset.rows.documents)


@pytest.mark.parametrize("sizes, room, expected", [([30, 5], 20, 15), ([30, 25], 20, 10), ([9, 9, 9], 20, 6)])
def test_the_longest_are_cut_first(sizes, room, expected):
    assert _common_length(sizes, room) == expected
