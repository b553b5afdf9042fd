"""Classes of options: what their fields take, how they describe it, and what is said of a mistake."""

import dataclasses
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Interval, Predicate

from fastjax.errors import ConfigError
from fastjax.options import checked, describe


@checked("inner")
class Inner:
    path: str
    weight: Annotated[float, Interval(gt=0)] | None = None


@checked("outer")
class Outer:
    size: Annotated[int, Interval(ge=1, le=8)] = 2
    parts: list[str | Inner] = dataclasses.field(default_factory=list)
    one: Literal["a", "b"] | Inner | None = None
    even: Annotated[int, Predicate(lambda number: number % 2 == 0), "an even integer"] = 0
    free: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.size == 7 and self.even:
            raise ConfigError("outer.size: expected another number than 7 with outer.even, got 7")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "an integer"),
        (Annotated[int, Interval(ge=1)], "an integer of at least 1"),
        (Annotated[int, Interval(le=9)], "an integer of at most 9"),
        (Annotated[float, Interval(gt=0)], "a number greater than 0"),
        (Annotated[float, Interval(lt=0)], "a number less than 0"),
        (Annotated[float, Interval(ge=0, lt=1)], "a number in [0, 1)"),
        (Annotated[float, Interval(gt=0, le=1)], "a number in (0, 1]"),
        (Annotated[float, Interval(gt=0, lt=1)], "a number in (0, 1)"),
        (Annotated[int, Interval(ge=1, le=8)] | Literal["auto"] | None, "an integer from 1 to 8 or auto or null"),
        (Annotated[int, "an even integer"], "an even integer"),
        (list[Annotated[int, Interval(ge=0)]], "a list of integers of at least 0"),
        (list[str | Inner], "a list of strings or sections with path"),
        (list[Literal["a", "b"]], "a list of some of a, b"),
        (dict[str, list[int]], "a mapping from strings to lists of integers"),
        (dict[str, Any] | bool, "a mapping from strings to values or true or false"),
        (Inner, "a section with path"),
    ],
)
def test_types_in_words(kind, words):
    assert describe(kind) == words


def test_what_fits_is_taken():
    outer = Outer(8, ["a", {"path": "b"}, Inner("c")], one={"path": "d", "weight": 2}, free={"x": [1, {"y": None}]})
    assert outer.parts == ["a", Inner("b"), Inner("c")]
    assert outer.one == Inner("d", 2.0) and outer.free == {"x": [1, {"y": None}]}
    assert Outer(parts=("a",)).parts == ["a"]
    assert dataclasses.replace(outer, size=3).size == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        outer.size = 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 9}, "outer.size: expected an integer from 1 to 8, got 9"),
        ({"size": True}, "outer.size: expected an integer from 1 to 8, got True"),
        ({"size": 2.0}, "outer.size: expected an integer from 1 to 8, got 2.0"),
        ({"size": "2"}, "outer.size: expected an integer from 1 to 8, got '2'"),
        ({"size": None}, "outer.size: expected an integer from 1 to 8, got None"),
        ({"size": 2**40}, "outer.size: expected a value of at most 4294967295, got 1099511627776"),
        ({"even": 3}, "outer.even: expected an even integer, got 3"),
        ({"parts": "a"}, "outer.parts: expected a list of strings or sections with path, got 'a'"),
        ({"parts": {"path": "a"}}, "outer.parts: expected a list of strings or sections with path, got {'path': 'a'}"),
        ({"parts": ["a", 3]}, "outer.parts: expected a list of strings or sections with path, got ['a', 3]"),
        ({"parts": ["a", {"pth": "b"}]}, "outer.parts[1].pth: unknown; expected one of path, weight"),
        ({"parts": ["a", {3: "b"}]}, "outer.parts[1].3: unknown; expected one of path, weight"),
        ({"parts": [{"weight": 3}]}, "outer.parts[0].path: expected a value, got none"),
        ({"parts": [Inner("a"), {"path": "a", "weight": 0}]},
         "outer.parts[1].weight: expected a number greater than 0 or null, got 0"),
        ({"one": {"path": 3}}, "outer.one.path: expected a string, got 3"),
        ({"one": "c"}, "outer.one: expected one of a, b or a section with path or null, got 'c'"),
        ({"free": {"x": [float("nan")]}}, "outer.free: expected a value that is finite, got nan"),
        ({"free": {"a\0": 1}}, "outer.free: expected a value without NUL or half a character, got 'a\\x00'"),
        ({"size": 7, "even": 2}, "outer.size: expected another number than 7 with outer.even, got 7"),
        ({"sise": 7}, "outer.sise: unknown; expected one of size, parts, one, even, free"),
    ],
)  # fmt: skip
def test_mistakes(settings, message):
    with pytest.raises(ConfigError) as caught:
        Outer(**settings)
    assert str(caught.value) == message
