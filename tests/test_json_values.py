"""Readers of JSON values: what is wrong, and where."""

from __future__ import annotations

import hashlib
import json
import math
import tracemalloc
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
    parse_elements,
    sealed,
    shared,
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


def test_elements_are_read_one_by_one() -> None:
    document = ' {"a" : [ 1 , {"b": [2]},[]] ,\n"c":[]} \n'
    assert parse_elements(document, {"a": str, "c": count}) == {"a": ("1", "{'b': [2]}", "[]"), "c": ()}
    whole = json.dumps({"a": [list(range(1000, 2000))] * 50})
    tracemalloc.start()
    try:
        assert parse_elements(whole, {"a": sum}) == {"a": (sum(range(1000, 2000)),) * 50}
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5 * 1000 * 40, "the values of one element, not of fifty"


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ('{"a": [1, -1]}', "a[1]"),
        ("{}", "a"),
        *((text, "") for text in ("", "[]", "3", '{"a": [1]} 2', '{"a": [1]', '{"a": [1,]}', '{"a": [1],}')),
        *(
            (text, "")
            for text in ('{"a" [1]}', '{"a": 1}', '{"a": [NaN]}', '{"b": []}', '{"a": [], "a": []}')
        ),
        *(
            (text, "")
            for text in ("{1: []}", "{[]: []}", '{"a": [' + "[" * 50_000, f'{{"a": [{"9" * 5000}]}}')
        ),
    ],
)
def test_other_documents_of_elements_are_refused(document: str, path: str) -> None:
    with pytest.raises(JsonValueError) as refusal:
        parse_elements(document, {"a": count})
    assert refusal.value.path == path


def test_equal_values_are_one_object() -> None:
    one, other, third = each(shared(each(count)))([[1000, 1], [1000, 1], [1000, 2]])
    assert one is other
    assert third == (1000, 2)


@pytest.mark.parametrize(
    "data", [{}, {"b": [], "a": [1, {"d": 2, "c": "\u00e4"}], "\n": {"y": 1.5, "x": None}}]
)
def test_a_seal_is_the_hash_of_compact_json_in_the_order_of_keys(data: dict[str, Any]) -> None:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    assert sealed(data)["sha256"] == hashlib.sha256(canonical.encode()).hexdigest()
