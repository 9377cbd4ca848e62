"""Branches and loops that data decide, compiled and run, against onnxruntime."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridc
from hybridc import emulator
from hybridc.errors import HybridcError, ModelError
from tests.support.exact_reference import exact_session
from tests.support.expansion import parsed
from tests.support.machines import EAGER_GPU

BRANCHES = """g (float[3, 4] x, float[4] w) => (float[3, 4] y, float[3] z) {
    total = ReduceSum<keepdims = 0>(x)
    zero = Constant<value = float {0.0}>()
    above = Greater(total, zero)
    y, z = If<then_branch = a () => (float[3, 4] p, float[3] q) {
                p = Mul(x, w)
                q = ReduceMax<keepdims = 0, axes = [1]>(p)
           }, else_branch = b () => (float[3, 4] r, float[3] s) {
                r = Exp(x)
                s = ReduceMin<keepdims = 0, axes = [1]>(x)
           }>(above)
}"""
# a position that is legal where its branch is taken, a divisor that is not zero there
GUARDED = """g (float[3, 4] x, int64 i, int64 n, bool[1] outer) => (float[4] y, int64 m) {
    three = Constant<value = int64 {3}>()
    inside = Less(i, three)
    first = Constant<value = int64 {0}>()
    y, m = If<then_branch = a () => (float[4] p, int64 q) {
        p, q = If<then_branch = c () => (float[4] t, int64 u) {
            t = Gather(x, i)
            u = Div(three, n)
        }, else_branch = d () => (float[4] v, int64 k) {
            v = Gather(x, n)
            k = Mod(i, three)
        }>(inside)
    }, else_branch = b () => (float[4] r, int64 s) {
        r = Gather(x, first)
        s = Identity(i)
    }>(outer)
}"""
# ends once a state is large; the most trips are known. The trip behind the last would read outside of x
GREEDY = """g (float[5, 3] x, float limit) => (float[3] y, int64 n) {
    most = Constant<value = int64 {7}>()
    yes = Constant<value = bool {1}>()
    zero = Constant<value = int64 {0}>()
    start = Constant<value = float[3] {0.0, 0.0, 0.0}>()
    y, n = Loop<body = b (int64 i, bool go, float[3] s, int64 c) => (bool on, float[3] t, int64 d) {
        row = Gather(x, c)
        t = Add(s, row)
        one = Constant<value = int64 {1}>()
        d = Add(c, one)
        five = Constant<value = int64 {5}>()
        in_range = Less(d, five)
        size = ReduceMax<keepdims = 0>(t)
        is_small = Less(size, limit)
        on = And(in_range, is_small)
    }>(most, yes, start, zero)
}"""
NESTED = """g (float[2] x, float limit, bool go) => (float[2] y) {
    most = Constant<value = int64 {3}>()
    y = Loop<body = outer (int64 i, bool c, float[2] s) => (bool on, float[2] t) {
        inner_most = Constant<value = int64 {2}>()
        yes = Constant<value = bool {1}>()
        u = Loop<body = inner (int64 j, bool e, float[2] v) => (bool f, float[2] w) {
            w = Add(v, x)
            a = ReduceSum<keepdims = 0>(w)
            f = Less(a, limit)
        }>(inner_most, yes, s)
        b = ReduceSum<keepdims = 0>(u)
        on = Less(b, limit)
        t = If<then_branch = p () => (float[2] q) { q = Mul(u, x) },
               else_branch = r () => (float[2] z) { z = Neg(u) }>(on)
    }>(most, go, x)
}"""
# ends when a state is large; only --bound says how many trips there may be. Leaves a row for each
WHILE = """g (float[3] x, float limit) => (int64 n, float[3] y, float[N, 3] all) {
    yes = Constant<value = bool {1}>()
    zero = Constant<value = int64 {0}>()
    n, y, all = Loop<body = b (int64 i, bool go, int64 c, float[3] s)
        => (bool on, int64 d, float[3] t, float[3] u) {
        one = Constant<value = int64 {1}>()
        d = Add(c, one)
        t = Add(s, s)
        u = Exp(t)
        size = ReduceMax<keepdims = 0>(t)
        on = Less(size, limit)
    }>(, yes, zero, x)
}"""
# as many trips as are fed, unless a state is negative
COUNTED = """g (float[2] x, int64 m, bool go) => (float[2] y, float[N] all) {
    y, all = Loop<body = b (int64 i, bool c, float[2] s) => (bool on, float[2] t, float sum) {
        n = Cast<to = 1>(i)
        t = Add(s, n)
        sum = ReduceSum<keepdims = 0>(t)
        zero = Constant<value = float {0.0}>()
        on = GreaterOrEqual(sum, zero)
    }>(m, go, x)
}"""


def _agrees(folder: Path, text: str, runs: Sequence[Mapping[str, Any]], **options: Any) -> None:
    model = parsed(text)
    reference = exact_session(model)
    hybridc.compile(model, folder / "m.hyb", plan_seconds=0.05, **{"target": "avx2", **options})
    with hybridc.load(folder / "m.hyb") as session:
        for feeds in runs:
            wanted = reference.run(None, {name: np.asarray(value) for name, value in feeds.items()})
            for found, value in zip(session.run(None, feeds), wanted, strict=True):
                np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5)


def _numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_the_branch_that_data_choose_is_what_counts(tmp_path: Path) -> None:
    x = np.abs(_numbers(3, 4))
    _agrees(
        tmp_path,
        BRANCHES,
        [{"x": sign * x, "w": _numbers(4, seed=1)} for sign in (np.float32(1), np.float32(-1))],
    )


def test_what_is_not_taken_may_be_fed_anything(tmp_path: Path) -> None:
    cases = [(2, 2, True), (1, 3, True), (4, 2, True), (9, 0, False), (1, 0, False), (2, 9, True)]
    _agrees(
        tmp_path,
        GUARDED,
        [
            {"x": _numbers(3, 4), "i": np.array(i), "n": np.int64(n), "outer": np.array([outer])}
            for i, n, outer in cases
        ],
    )


def test_what_is_taken_is_checked_as_ever(tmp_path: Path) -> None:
    hybridc.compile(parsed(GUARDED), tmp_path / "m.hyb", target="avx2", plan_seconds=0.05)
    with hybridc.load(tmp_path / "m.hyb") as session:
        for i, n in ((-4, 1), (1, 0), (4, 3)):
            feeds = {"x": _numbers(3, 4), "i": np.array(i), "n": np.array(n), "outer": np.array([True])}
            with pytest.raises(HybridcError) as refused:
                session.run(None, feeds)
            assert refused.value.code == "HC560"


def test_a_loop_ends_when_its_states_say_so(tmp_path: Path) -> None:
    x = np.abs(_numbers(5, 3))
    _agrees(tmp_path, GREEDY, [{"x": x, "limit": np.float32(limit)} for limit in (-1, 1, 2, 3, 99)])


def test_nested(tmp_path: Path) -> None:
    runs = [
        {"x": np.array([0.5, a], np.float32), "limit": np.float32(limit), "go": np.array(go)}
        for a, limit, go in itertools.product((0.25, -1.5), (0.5, 2, 20), (True, False))
    ]
    _agrees(tmp_path, NESTED, runs)


def test_the_gpu_chooses(tmp_path: Path) -> None:
    x = np.abs(_numbers(3, 4))
    runs = [{"x": sign * x, "w": _numbers(4, seed=1)} for sign in (np.float32(1), np.float32(-1))]
    emulator.start(1 << 24)
    try:
        _agrees(tmp_path, BRANCHES, runs, target="cuda+avx2", machine=EAGER_GPU)
    finally:
        emulator.reset()


def _doubled(limit: float) -> dict[str, Any]:
    return {"x": np.array([1, 0.5, 0.25], np.float32), "limit": np.float32(limit)}


def test_a_bound_says_how_many_trips_there_may_be(tmp_path: Path) -> None:
    _agrees(tmp_path, WHILE, [_doubled(limit) for limit in (0, 3, 60, 10)], bounds={"Loop_2": 6})


def test_a_loop_that_does_not_end_within_its_bound_is_refused(tmp_path: Path) -> None:
    hybridc.compile(parsed(WHILE), tmp_path / "m.hyb", target="avx2", bounds={"Loop_2": 3})
    with hybridc.load(tmp_path / "m.hyb") as session:
        for limit in (9, 1e9):
            with pytest.raises(
                HybridcError, match="'Loop_2': has not ended within its bound of 3"
            ) as refused:
                session.run(None, _doubled(limit))
            assert refused.value.code == "HC586" and "--bound" in str(refused.value)
            assert session.run(["n"], _doubled(7))[0] == 3


def test_the_number_of_trips_may_be_fed(tmp_path: Path) -> None:
    x = np.array([0.5, -0.25], np.float32)
    runs = [
        {"x": sign * x, "m": np.array(m), "go": np.array(go)}
        for sign, m, go in itertools.product((np.float32(1), np.float32(-1)), (0, 1, 4), (True, False))
    ]
    _agrees(tmp_path, COUNTED, runs, bounds={"Loop_0": 4})
    with hybridc.load(tmp_path / "m.hyb") as session, pytest.raises(HybridcError) as refused:
        session.run(None, {"x": x, "m": np.array(5), "go": np.array(True)})
    assert refused.value.code == "HC586"


def test_a_bound_of_no_loop_is_refused() -> None:
    with pytest.raises(HybridcError, match="no loop 'Loop_9'") as refused:
        hybridc.plan(parsed(WHILE), target="avx2", bounds={"Loop_9": 4})
    assert refused.value.code == "HC528" and "Loop_2" in str(refused.value)


SIZED = """g (float[2, 3] x, bool c) => (float[2, 3] y) {
    y = If<then_branch = a () => (float[M, K] p) {
        e = Exp(x)
        shape = Shape(e)
        rank = Shape(shape)
        ones = ConstantOfShape<value = int64[1] {1}>(rank)
        minus = Constant<value = int64 {-1}>()
        negative = Mul(ones, minus)
        unknown = Equal(shape, negative)
        sizes = Where(unknown, ones, shape)
        row = Constant<value = float[1, 3] {1, 2, 3}>()
        p = Expand(row, sizes)
    }, else_branch = b () => (float[2, 3] q) { q = Relu(x) }>(c)
}"""
"""As torch writes `expand`."""


def test_shapes_within_a_branch_are_known_after_some_rounds(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3), np.float32)
    _agrees(tmp_path, SIZED, [{"x": x, "c": np.array(c)} for c in (True, False)])


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (
            """y = If<then_branch = a () => (float[3] p) { p = Exp(x) },
               else_branch = b () => (float[1] q) { q = ReduceSum(x) }>(c)""",
            "branches have different shapes",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(body: str, wanted: str) -> None:
    model = parsed(f"g (float[3] x, bool c) => (float[N] y) {{ {body} }}")
    with pytest.raises(ModelError, match=wanted) as refused:
        hybridc.compile(model, stop_after="canonicalize", target="avx2")
    assert refused.value.code == "HC114" and "--value c=true" in refused.value.remedy
    hybridc.compile(model, stop_after="canonicalize", target="avx2", values={"c": np.array(True)})
