import time

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastjax.strict_yaml import YamlError, parse, read

DEEP_ALIASES = "\n".join(f"a{n}: &a{n} {'[' * 50}{f'*a{n - 1}' if n else 0}{']' * 50}" for n in range(3))
BOMB = "a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="ascii")), inner),
        max_leaves=10,
    )
)
@settings(max_examples=20, deadline=None)
def test_what_is_written_is_read(value):
    assert parse(yaml.safe_dump({"value": value})) == {"value": value}


def test_scalars_as_settings_have_them():
    text = "{a: 1e-4, b: 5, c: 2024-13-45, d: yes, e: ~, f: .inf, g: 1_000, h: -.5, i: 1.e+3, j: e5, k: ''}"
    found = [1e-4, 5, "2024-13-45", True, None, float("inf"), 1000, -0.5, 1000.0, "e5", ""]
    assert list(parse(text).values()) == found
    assert parse("a: &a [1]\nb: *a") == {"a": [1], "b": [1]}
    assert parse("base: &base {x: 1, y: 2}\nown: {<<: *base, y: 3}")["own"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a: 1\nb: {c: 1,\n c: 2}\n", 3, "the same key twice: c"),
        ("a: 1\nb: 2\n'a': 3", 3, "the same key twice: a"),
        ("a: [\n" + "[" * 3000, 2, "nested more than 100 deep"),
        ("a:\n" + "".join(" " * n + "-\n" for n in range(1, 300)), 101, "nested more than 100 deep"),
        (DEEP_ALIASES, 2, "nested more than 100 deep"),
        (BOMB, 6, "more than 100000 values, those of an alias counted wherever it stands"),
        ("a: &a\n - *a", 2, "an alias within what it stands for"),
        ("a: 1\nb: " + "9" * 4301, 2, "a number of more than 300 digits"),
        ("a: " + ":".join(["1"] * 60_000), 1, "a number of more than 300 digits"),
        ('a:\n - "\\ud83d"', 2, "half a character"),
        ("a: 1\nb: \x01", 2, "a character that YAML does not allow: 0x1"),
        ('a: "\\U99999999"', 1, "an escape or a directive"),
        ("a: !!int ''", 1, "what cannot be read as int"),
        ("a: !!timestamp noon", 1, "what cannot be read as timestamp: noon"),
        ("a: !!bool " + "x" * 5000, 1, "what cannot be read as bool: xxx"),
        ("a: !!python/object:os.system x", 1, "could not determine a constructor"),
        ("a: !!binary aGk=", 1, "could not determine a constructor"),
        ("a: 1\nb: !!set {c}", 2, "could not determine a constructor"),
        ("a: *" + "b" * 5000, 1, "found undefined alias"),
        ("a: 1\n--- \nb: 1", 2, "expected a single document in the stream, but found another document"),
    ],
)
def test_what_is_refused_with_its_line(text, line, problem):
    start = time.process_time()
    with pytest.raises(YamlError, match=problem) as caught:
        parse(text)
    assert caught.value.line == line
    assert len(str(caught.value)) < 300
    assert time.process_time() - start < 2


@given(st.text(st.sampled_from("ab:-?[]{},&*!<|>'\"%@\\#~0123456789.eExU_ \n\t"), max_size=40))
@example("%YAML " + "9" * 5000 + ".1\n---\na")
@settings(max_examples=100, deadline=None)
def test_any_text_is_read_or_refused(text):
    try:
        parse(text)
    except YamlError as error:
        assert error.problem


def test_lines():
    document = read("a: 1\n\nb:\n  c: [1,\n    2]\n  d: &x {e: 3}\n  f:\n    <<: *x\n    g: 4\n")
    lines = {("a",): 1, ("b",): 3, ("b", "c"): 4, ("b", "c", 1): 5, ("b", "d", "e"): 6, ("b", "f", "g"): 9}
    lines[("b", "f", "e")] = 6  # where the merged mapping stands
    assert {path: document.line(path) for path in lines} == lines
    assert document.line(("b", "z", "y")) == 3  # of what is there on the way
    assert document.line(("z",)) is None and read("").line(("a",)) is None
