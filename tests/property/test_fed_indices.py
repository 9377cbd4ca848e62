"""Gathers and scatters of any shape: right for all legal indices, and for none a touch outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from hybridc.ir import Device
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.program.program import ProgramBuilder
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from hybridc.targets import ISAS, Target
from tests.support.random_examples import random_examples

LLVM = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "opt-level": 1})
op = relax.op


@dataclass(frozen=True)
class Case:
    """An operator on operands, the second of which are indices; `reference` is what numpy makes of them."""

    build: Callable[..., relax.Expr]
    reference: Callable[..., np.ndarray]
    operands: tuple[np.ndarray, ...]
    extents: tuple[int, ...]
    """Of the axes that the indices, along their last axis if there are several, count in."""


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["take", "gather_elements", "gather_nd", "scatter_elements", "scatter_nd"]))
    dtype = draw(st.sampled_from(["int32", "int64"] if not kind.endswith("nd") else ["int64"]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    x = random.standard_normal(shape).astype(np.float32)

    def indices(wanted: tuple[int, ...], extents: tuple[int, ...]) -> np.ndarray:
        low, high = (np.array([e * sign for e in extents]) for sign in (-1, 1))
        return random.integers(low, high, wanted).astype(dtype)

    if kind == "take":
        taken = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
        extents = (shape[axis],)
        i = indices(taken or (1,), extents).reshape(taken)
        return Case(
            lambda x, i: op.take(x, i, axis, mode="wrap"), lambda x, i: x.take(i, axis), (x, i), extents
        )
    if kind.endswith("elements"):
        extents = (shape[axis],)
        taken = tuple(draw(st.integers(1, n)) for n in shape)
        taken = (*taken[:axis], draw(st.integers(1, 6)), *taken[axis + 1 :])
        i, new = indices(taken, extents), random.standard_normal(taken).astype(np.float32)
        lines = x[tuple(slice(None) if a == axis else slice(n) for a, n in enumerate(taken))]
        if kind == "gather_elements":
            return Case(
                lambda x, i: op.gather_elements(x, i, axis),
                lambda x, i: np.take_along_axis(lines, i, axis),
                (x, i),
                extents,
            )

        def added(x: np.ndarray, i: np.ndarray, new: np.ndarray) -> np.ndarray:
            result = x.copy()
            for at in np.ndindex(*i.shape):
                result[(*at[:axis], i[at], *at[axis + 1 :])] += new[at]
            return result

        return Case(
            lambda x, i, new: op.scatter_elements(x, i, new, axis, "add"), added, (x, i, new), extents
        )
    depth = draw(st.integers(1, len(shape)))
    count, extents = draw(st.integers(1, 4)), shape[:depth]
    i = indices((count, depth), extents)
    if kind == "gather_nd":
        return Case(op.gather_nd, lambda x, i: x[tuple(i.T)], (x, i), extents)
    new = random.standard_normal((count, *shape[depth:])).astype(np.float32)

    def replaced(x: np.ndarray, i: np.ndarray, new: np.ndarray) -> np.ndarray:
        result = x.copy()
        for place, value in zip(i, new, strict=True):
            result[tuple(place)] = value
        return result

    return Case(op.scatter_nd, replaced, (x, i, new), extents)


def compiled(case: Case) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """The operator's kernel: operands to result and faults."""
    inputs = [
        relax.Var(f"p{i}", relax.TensorType(a.shape, a.dtype.name)) for i, a in enumerate(case.operands)
    ]
    builder = ProgramBuilder(inputs)
    result = builder.emit(case.build(*inputs), ("node",), "y")
    [function] = fuse(builder.finish([result])).functions.values()
    made = schedule(Request(function, frozenset(), Target((), ISAS["avx2"])), Device.CPU)
    assert made is not None
    named = made.function.with_attr("global_symbol", "main")
    kernel = tvm.compile(tvm.IRModule({"main": named}), target=LLVM)["main"]

    def run(*operands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rest = [np.zeros([int(n) for n in p.shape], str(p.dtype)) for p in named.params[len(operands) :]]
        tensors = [tvm.runtime.tensor(np.array(a, order="C")) for a in (*operands, *rest)]
        kernel(*tensors)
        return tensors[len(operands)].numpy(), tensors[-1].numpy()

    return run


@pytest.mark.isa("avx2")
@random_examples(12)
@given(case=cases(), data=st.data())
def test_any_index_is_right_or_reported(case: Case, data: st.DataObject) -> None:
    run = compiled(case)
    result, faults = run(*case.operands)
    np.testing.assert_allclose(result, case.reference(*case.operands), rtol=1e-5, atol=1e-6)
    assert not faults.any()

    x, i, *rest = case.operands
    place = data.draw(st.integers(0, i.size - 1))
    extent = case.extents[place % len(case.extents)]
    limits = np.iinfo(i.dtype)
    outside = st.one_of(
        st.integers(int(limits.min), -extent - 1),
        st.integers(extent, int(limits.max)),
        st.sampled_from([extent, -extent - 1, int(limits.min), int(limits.max)]),
    )
    bad = np.array(i)
    bad.reshape(-1)[place] = value = data.draw(outside)
    _, faults = run(x, bad, *rest)
    assert [1, value] in faults.tolist()
