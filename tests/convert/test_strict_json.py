import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.errors import shown
from convert.strict_json import MAX_DEPTH, JsonError, decode, parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=30, deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_what_is_written_is_read(value, ascii_only, indent):
    assert parse(" \n" + json.dumps(value, ensure_ascii=ascii_only, indent=indent) + "\t ") == value


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        ('{"a": 1}\n{"a": 2}', 2, 1, "something stands behind the value"),
        ('{"a": 1,}', 1, 9, "double quotes|trailing comma"),
        ("", 1, 1, "Expecting value"),
        ('{"a": {"b": 1,\n"c": 2,\n "b": 3}}', 3, 2, "the same key twice: b$"),
        ('{"b": {"b": 1}, "a": ["b", "b"],\n"\\u0061": 0}', 2, 1, "the same key twice: a$"),
        ('[{"a": 0}, {"a": 0,\n"a": {"x": 1, "x": 2}}]', 2, 1, "the same key twice: a$"),
        ('["\\ud83d\\ude00",\n"\\ud83d"]', 2, 1, "half a character"),
        ('{"\\uDE00": 1}', 1, 2, "half a character"),
        (f"[1.{'1' * 4301},\n-{'1' * 4301}]", 2, 1, "an integer of more than 300 digits"),
        ("[" * 100_000, 1, MAX_DEPTH + 1, "nested more than 100 deep"),
        ("[\n" + '{"a":' * 101 + "0" + "}" * 101 + "]", 2, 5 * (MAX_DEPTH - 1) + 1, "nested more than 100 deep"),
    ],
)
def test_what_is_refused_with_its_place(text, line, column, problem):
    with pytest.raises(JsonError, match=problem) as caught:
        parse(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert len(str(caught.value)) < 150


def test_what_is_just_allowed():
    assert parse("9" * 300) == int("9" * 300)
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse(f"[{deep[1:-1]}]") == json.loads(deep)
    assert parse('{"a": {"b": 1}, "b": {"b": 1}}') == {"a": {"b": 1}, "b": {"b": 1}}
    assert parse('"\\\\ud800 \\ud83d\\ude00"') == "\\ud800 😀"


def test_a_value_among_others():
    text = '[1, {"a": 2}, {"b": 1, "b": 2}]'
    assert decode(text, 4) == ({"a": 2}, 12)
    with pytest.raises(JsonError, match="line 1, column 24: the same key twice: b"):
        decode(text, 14)


def test_a_second_key_among_many_takes_no_time():
    keys = [f'"key {n}": 0' for n in range(20_000)]
    start = time.process_time()
    with pytest.raises(JsonError, match="the same key twice: key 19999"):
        parse("{" + ",".join([*keys, keys[-1]]) + "}")
    assert time.process_time() - start < 2


@pytest.mark.parametrize("value", [(1,), (), [1, ("a", {"b": b"c"})], {"a": [None], 1: 2.5}, "it's", 10**100, {1}])
def test_small_values_are_shown_as_python_writes_them(value):
    assert shown(value) == repr(value)


def test_large_values_are_shown_in_no_time():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    cyclic: list = []
    cyclic.append(cyclic)
    for value in ("x" * 10**7, ["x" * 10**6] * 10**4, deep, cyclic, 10**100_000, {n: n for n in range(10**5)}):
        start = time.process_time()
        assert len(shown(value)) <= 201
        assert time.process_time() - start < 0.5
