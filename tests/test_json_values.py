"""Readers of JSON values: what is wrong, and where."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from hybridc.json_values import (
    JsonValueError,
    count,
    each,
    flag,
    hexadecimal,
    mapping,
    member,
    number,
    optional,
    text,
)


def test_values_are_read() -> None:
    data = {"a": [{"b": 1}, {"b": None}], "c": {"x": "ff", "y": "0a"}, "d": True, "e": 1.5}
    assert member(data, "a", each(lambda one: member(one, "b", optional(count)))) == (1, None)
    assert member(data, "c", mapping(hexadecimal(2))) == {"x": "ff", "y": "0a"}
    assert (member(data, "d", flag), member(data, "e", number)) == (True, 1.5)


@pytest.mark.parametrize(
    ("read", "values"),
    [
        (text, [1, None, b"x", []]),
        (count, [-1, True, 1.0, "1", None]),
        (number, [True, math.inf, -math.inf, math.nan, "1", None, 10**400]),
        (flag, [0, 1, "true", None]),
        (hexadecimal(2), ["f", "FF", "fff", "g0", 12, "ff\n"]),
        (each(count), [{}, "ab", 3, None, [1, -1]]),
        (mapping(count), [[], "ab", {"a": -1}, {1: 1}]),
    ],
)
def test_other_values_are_refused(read: Callable[[Any], Any], values: list[Any]) -> None:
    for value in values:
        with pytest.raises(JsonValueError):
            read(value)


def test_an_error_names_the_path_of_the_value() -> None:
    def read(data: Any) -> Any:
        return member(data, "plans", each(lambda plan: member(plan, "pins", mapping(count))))

    for data, path in (
        ({"plans": [{"pins": {}}, {"pins": {"k": -1}}]}, "plans[1].pins.k"),
        ({"plans": [{}]}, "plans[0].pins"),
        ({"plans": 3}, "plans"),
        ({}, "plans"),
        ({"plans": [3]}, "plans[0]"),
        ([], ""),
    ):
        with pytest.raises(JsonValueError) as refusal:
            read(data)
        assert refusal.value.path == path


def test_errors_of_other_readers_get_a_path_too() -> None:
    with pytest.raises(JsonValueError, match=r"a\[0\]: .*'x'"):
        member({"a": ["x"]}, "a", each(int))
