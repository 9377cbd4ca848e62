"""Ranges of sizes, and the buckets that they are divided into."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.errors import UsageError
from hybridc.keywords import options_of
from hybridc.options import parse_dim, parse_shape
from hybridc.sizes import (
    MOST_BUCKETS,
    Interval,
    Sizes,
    Sum,
    divided,
    listed,
    listing_remedy,
    parse_sizes,
    union_text,
    with_sums,
)


@given(st.integers(1, 2000), st.integers(0, 5000), st.integers(1, 9))
def test_buckets_cover_a_range_without_gap(low: int, more: int, most: int) -> None:
    buckets = Sizes((Interval(low, low + more),), is_divided=False).divided(most)
    assert buckets[0].low == low and buckets[-1].high == low + more and len(buckets) <= most
    assert all(one.high + 1 == other.low for one, other in pairwise(buckets))
    assert low > 1 or more == 0 or most == 1 or buckets[0] == Interval(1, 1)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=4))
def test_all_open_dimensions_together_have_few_buckets(highs: list[int]) -> None:
    buckets = divided([parse_sizes(f"1..{high}") for high in highs])
    assert len(buckets) == len(set(buckets)) <= max(MOST_BUCKETS + 1, 2 ** len(highs))
    assert [each.high for each in buckets[-1]] == highs


def test_what_is_written_is_what_is_read() -> None:
    assert parse_dim("N=1..8") == ("N", Sizes((Interval(1, 8),), is_divided=False))
    assert parse_dim("N=1..8:2,8") == ("N", Sizes((Interval(1, 2), Interval(3, 8))))
    assert parse_dim("a=b=64,128")[1] == Sizes((Interval(64, 64), Interval(128, 128)))
    assert parse_shape("x=1..8x3x_")[1] == (parse_sizes("1..8"), 3, None)
    for sizes in ({"N": range(1, 9)}, {"N": "1..8"}):
        assert options_of({"dims": sizes}).dims == (("N", parse_sizes("1..8")),)
    assert options_of({"dims": {"N": [64, 128]}}).dims == (("N", parse_sizes("64,128")),)
    assert options_of({"shapes": {"x": ["1..8", 3]}}).shapes == (("x", (parse_sizes("1..8"), 3)),)


@pytest.mark.parametrize(
    "text", ["0..4", "4..2", "1..8:2", "1..8:9,8", "8,4", "1..x", "1...3", "1..99999999999"]
)
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_dim(f"N={text}")
    assert refused.value.code == "HC512"


def test_text_of_a_union() -> None:
    assert union_text([Interval(1, 1), Interval(2, 4), Interval(64, 64)]) == "1..4 or 64"
    assert str(parse_sizes("1..8:2,8")) == "1..8" and str(parse_sizes("64,128")) == "64,128"


def test_buckets_grow_by_equal_factors() -> None:
    highs = [each.high for each in parse_sizes("1..512").divided(8)]
    assert highs[0] == 1 and max(math.ceil(b / a) for a, b in pairwise(highs[1:])) <= 3


def test_a_dimension_may_be_a_sum_of_others() -> None:
    """In its own name, or as it is given."""
    sizes = options_of({"dims": {"past": 64, "n": [1, 8], "total": "past + n"}}).dims
    assert sizes[-1] == parse_dim("total=past+n") == ("total", Sum(("past", "n")))
    assert parse_dim("total=past+1") == ("total", Sum(("past",), 1))
    following = Sizes(listed([65, 72]).intervals, follows="n")
    assert with_sums((), dict(sizes))["total"] == following
    given: dict[str, int | Sizes | Sum] = {"past": 64, "n": listed([1, 8])}
    assert with_sums(["past", "past + n", "past + 2", "past + other"], given) == {
        **given,
        "past + n": following,
        "past + 2": 66,
    }
    assert with_sums(["past + n"], {**given, "past + n": 70})["past + n"] == 70
    assert with_sums(["past + past"], given)["past + past"] == 128
    assert "n + n" not in with_sums(["n + n"], given)


@pytest.mark.parametrize("n", [{}, {"n": "1..8"}, {"n": [1, 8], "past": [32, 64]}])
def test_a_sum_of_what_is_not_known_is_refused(n: dict[str, object]) -> None:
    dims = options_of({"dims": {"past": 64, **n, "total": "past + n"}}).dims
    with pytest.raises(UsageError) as refused:
        with_sums((), dict(dims))
    assert refused.value.code == "HC512" and "--dim past=64 --dim n=64" in refused.value.remedy


def test_sizes_are_listed_by_name_or_in_the_shape_of_an_input() -> None:
    assert listing_remedy([]).endswith("for example --dim NAME=64,128")
    assert listing_remedy(["n", "x[1]"]).endswith("for example --dim n=64,128 64,128 for x[1] in --shape")
