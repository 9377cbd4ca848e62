"""Bounds of index expressions hold for every value of the variables."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.padding.intervals import Interval, Intervals, point

OUTER, INNER = tirx.Var("outer", "int64"), tirx.Var("inner", "int64")
EXTENT = 7
"""Of both variables."""


def expressions() -> st.SearchStrategy[ir.Expr]:
    leaves = st.one_of(
        st.sampled_from([OUTER, INNER]), st.integers(0, 40).map(lambda n: tirx.const(n, "int64"))
    )
    divisors = st.integers(1, 12).map(lambda n: tirx.const(n, "int64"))

    def grown(inner: st.SearchStrategy[ir.Expr]) -> st.SearchStrategy[ir.Expr]:
        return st.one_of(
            st.builds(lambda a, b: a + b, inner, inner),
            st.builds(lambda a, n: a * n, inner, divisors),
            st.builds(tirx.min, inner, inner),
            st.builds(tirx.max, inner, inner),
            st.builds(tirx.floordiv, inner, divisors),
            st.builds(tirx.floormod, inner, divisors),
        )

    return st.recursive(leaves, grown, max_leaves=8)


def value_of(expr: ir.Expr, outer: int, inner: int) -> int:
    values = {OUTER: tirx.const(outer, "int64"), INNER: tirx.const(inner, "int64")}
    return int(sym.Analyzer().simplify(substitute(expr, values)))


@given(expressions())
def test_values_are_between_the_ends(expr: ir.Expr) -> None:
    intervals = Intervals()
    intervals.known[OUTER] = point(OUTER)
    intervals.known[INNER] = Interval(tirx.const(0, "int64"), tirx.const(EXTENT - 1, "int64"))
    found = intervals.of(expr)
    assert found is not None
    for outer, inner in product(range(EXTENT), repeat=2):
        low, high = (value_of(end, outer, 0) for end in (found.low, found.high))
        assert low <= value_of(expr, outer, inner) <= high


def test_remainders_in_one_period_grow_with_the_value() -> None:
    intervals = Intervals()
    intervals.known[OUTER] = point(OUTER)
    intervals.known[INNER] = Interval(tirx.const(0, "int64"), tirx.const(3, "int64"))
    found = intervals.of(tirx.floormod(OUTER * 4 + INNER, tirx.const(8, "int64")))
    assert found is not None
    assert [value_of(found.low, n, 0) for n in range(4)] == [0, 4, 0, 4]
    assert [value_of(found.high, n, 0) for n in range(4)] == [3, 7, 3, 7]


def test_what_data_decide_has_no_bounds() -> None:
    table = tirx.decl_buffer((8,), "int64", "table")
    assert Intervals().of(tirx.BufferLoad(table, [tirx.const(0, "int64")])) is None
    assert Intervals().of(OUTER) is None
