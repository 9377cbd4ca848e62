"""Functions that trust what they are fed, made safe; and where checks come to stand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

from hybridc.checks import checked_divisor, checked_index, markers, numbered
from hybridc.ir import Device
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.safety.guard import made_safe
from hybridc.schedules.select import schedule
from hybridc.schedules.shapes import index_shape
from hybridc.targets import parse_target

TARGET = parse_target("cuda:sm_80+avx2")
LLVM = tvm.target.Target({"kind": "llvm", "mcpu": "haswell"})
WILD = np.array([3, -1, 10**6, -(10**6), 2**63 - 1, -(2**63), 0, 5])
pytestmark = pytest.mark.isa("avx2")


def function(shape: tuple[int, ...], dtype: str, body: Callable[..., tirx.Expr], rows: int) -> tirx.PrimFunc:
    """out[i, j] = body(table, fed, i, j) with a table [8, 16]."""
    table = te.placeholder(index_shape((8, 16)), "float32", "table")
    fed = te.placeholder(index_shape(shape), dtype, "fed")
    out = te.compute(index_shape((rows, 16)), lambda i, j: body(table, fed, i, j), name="out")
    made = te.create_prim_func([table, fed, out])
    return numbered(made, [0] * len(markers(made.body)))


def scheduled(made: tirx.PrimFunc, device: Device = Device.CPU) -> Scheduled:
    result = schedule(Request(made, frozenset(), TARGET), device)
    assert result is not None
    return result


def run(made: Scheduled, *inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The result and, if the function has checks, its faults. The table lies between walls of NaN."""
    module = tvm.IRModule({"main": made.function.with_attr("global_symbol", "main")})
    rest = [np.zeros([int(n) for n in p.shape], str(p.dtype)) for p in made.function.params[len(inputs) :]]
    memory = np.full(3 * inputs[0].nbytes + 64, 0xFF, np.uint8)  # all ones are a NaN
    start = -memory.ctypes.data % 64 + inputs[0].nbytes
    middle = memory[start : start + inputs[0].nbytes].view(np.float32).reshape(inputs[0].shape)
    middle[:] = inputs[0]
    table = tvm.runtime.from_dlpack(middle)
    tensors = [table, *(tvm.runtime.tensor(np.asarray(a)) for a in (*inputs[1:], *rest))]
    tvm.compile(module, target=LLVM)["main"](*tensors)
    return tensors[len(inputs)].numpy(), tensors[-1].numpy()


TABLE = np.arange(128, dtype=np.float32).reshape(8, 16)


def test_index_that_nobody_checked_stays_inside():
    made = function((8,), "int64", lambda table, fed, i, j: table(fed(i), j), 8)
    result, _ = run(scheduled(made), TABLE, WILD)
    assert np.isfinite(result).all()
    np.testing.assert_array_equal(result[[0, 6, 7]], TABLE[[3, 0, 5]])


def test_position_computed_in_floating_point_stays_inside():
    made = function(
        (8,), "float32", lambda table, fed, i, j: table(tirx.floor(fed(i)).astype("int32") + 1, j), 8
    )
    positions = np.array([2.5, -1, np.nan, np.inf, -np.inf, 1e30, 2**31, -3e9], np.float32)
    result, _ = run(scheduled(made), TABLE, positions)
    assert np.isfinite(result).all()
    np.testing.assert_array_equal(result[:2], TABLE[[3, 0]])


def test_divisor_that_nobody_checked_does_no_harm():
    made = function(
        (8,), "int64", lambda table, fed, i, j: table(tirx.floormod(tirx.truncdiv(64, fed(i)), 8), j), 8
    )
    result, _ = run(scheduled(made), TABLE, np.array([0, -1, 8, 2**63 - 1, -(2**63), 64, 32, 16]))
    np.testing.assert_array_equal(result[[2, 5, 6, 7]], TABLE[[0, 1, 2, 4]])


def test_check_stands_outside_of_the_loop_over_a_row():
    made = function((8,), "int64", lambda table, fed, i, j: table(checked_index(fed(i), 8, "Gather"), j), 8)
    safe = scheduled(made)
    depth: list[str] = []
    kinds: list[int] = []

    def loop(node: tirx.For) -> None:
        kinds.append(int(node.kind))

    def condition(node: tirx.IfThenElse) -> None:
        depth.append(f"behind {len(kinds)} loops")

    tvm_ffi.structural_walk(safe.function.body, [(tirx.For, loop), (tirx.IfThenElse, condition)], order="pre")
    # rows, then vectors of a row, whose elements are still loaded at once
    assert depth == ["behind 1 loops"]
    assert kinds[-1] == tirx.ForKind.VECTORIZED
    result, faults = run(safe, TABLE, np.array([0, -1, -8, 7, 1, 2, 3, 4]))
    np.testing.assert_array_equal(result, TABLE[[0, -1, -8, 7, 1, 2, 3, 4]])
    assert not faults.any()


def test_check_under_a_condition_reads_only_where_it_holds():
    """As padding in front of a gather does: there is no index for the rows that are padding."""

    def body(table: te.Tensor, fed: te.Tensor, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        index = checked_index(fed(i - 1), 8, "Gather")
        return tirx.if_then_else(tirx.all(i >= 1, i < 4), table(index, j), tirx.const(0, "float32"))

    result, faults = run(scheduled(function((3,), "int64", body, 5)), TABLE, np.array([7, -8, 2]))
    np.testing.assert_array_equal(result[1:4], TABLE[[7, 0, 2]])
    assert not result[[0, 4]].any()
    assert not faults.any()
    _, faults = run(scheduled(function((3,), "int64", body, 5)), TABLE, np.array([7, -9, 2]))
    assert faults.tolist() == [[1, -9]]


def test_index_taken_from_a_checked_index_is_checked_after_it():
    def body(table: te.Tensor, fed: te.Tensor, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        return table(checked_index(fed(checked_index(fed(i), 8, "Gather")), 8, "Gather"), j)

    made = function((8,), "int64", body, 8)
    chain = np.array([1, 2, 3, 4, 5, 6, 7, 0])
    result, faults = run(scheduled(made), TABLE, chain)
    np.testing.assert_array_equal(result, TABLE[chain[chain]])
    assert not faults.any()
    _, faults = run(scheduled(made), TABLE, np.array([1, 2, 3, 4, 5, 6, 7, 99]))
    assert faults.tolist() == [[1, 99], [1, 99]]


def test_every_lane_of_a_checked_division_is_checked():
    made = function(
        (8, 16), "int32", lambda table, fed, i, j: tirx.truncdiv(100, checked_divisor(fed(i, j), "Div")), 8
    )
    divisors = np.full((8, 16), 7, np.int32)
    result, faults = run(scheduled(made), TABLE, divisors)
    assert (result == 14).all()
    assert not faults.any()
    divisors[5, 3] = 0
    assert run(scheduled(made), TABLE, divisors)[1].tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "int64"])
@pytest.mark.parametrize("divide", ["truncdiv", "truncmod", "floordiv", "floormod"])
def test_fed_division_is_exact_for_extreme_integers(divide: str, dtype: str) -> None:
    """Against Python's integers: next to multiples of the divisor a rounded quotient would be off by one."""
    limits = np.iinfo(dtype)
    extremes = {limits.min, limits.min + 1, -7, -2, -1, 1, 2, 3, 7, 46341, limits.max - 1, limits.max}
    legal = sorted(value for value in extremes if limits.min <= value <= limits.max)
    pairs = [(n, d) for n in [*legal, 0] for d in legal if d and (n, d) != (limits.min, -1)]
    rows = len(pairs) // 16
    dividends, divisors = np.array(pairs[: rows * 16], dtype).T.reshape(2, rows, 16).copy()
    x, y = (te.placeholder(index_shape((rows, 16)), dtype, name) for name in "xy")
    operate = getattr(tirx, divide)
    out = te.compute(
        index_shape((rows, 16)), lambda i, j: operate(x(i, j), checked_divisor(y(i, j), "Div")), name="out"
    )
    made = numbered(te.create_prim_func([x, y, out]), [0])
    safe = scheduled(made).function.with_attr("global_symbol", "main")
    arrays = dividends, divisors, np.zeros((rows, 16), dtype), np.zeros((1, 2), np.int64)
    *_, result, faults = tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(tvm.IRModule({"main": safe}), target=LLVM)["main"](*tensors)
    assert not faults.numpy().any()

    def exact(n: int, d: int) -> int:
        toward_zero = abs(n) // abs(d) * (1 if (n < 0) == (d < 0) else -1)
        quotient = n // d if divide.startswith("floor") else toward_zero
        return quotient if divide.endswith("div") else n - quotient * d

    expected = [exact(n, d) for n, d in pairs[: rows * 16]]
    assert result.numpy().reshape(-1).tolist() == expected


def test_function_that_follows_loops_alone_stays_as_it_is():
    made = function((8,), "int64", lambda table, fed, i, j: table(i, j) * 2, 8)
    by_rule = Scheduled(made, "none")
    assert made_safe(by_rule) is by_rule


def test_check_on_a_gpu_is_made_by_its_threads():
    made = function((8,), "int64", lambda table, fed, i, j: table(checked_index(fed(i), 8, "Gather"), j), 8)
    body = scheduled(made, Device.GPU).function.body
    outer: list[object] = []

    def before(node: tirx.AttrStmt) -> tvm_ffi.WalkResult:
        return tvm_ffi.WalkResult.SKIP if node.attr_key == "thread_extent" else tvm_ffi.WalkResult.ADVANCE

    tvm_ffi.structural_walk(
        body, [(tirx.AttrStmt, before), ((tirx.Bind, tirx.IfThenElse), outer.append)], order="pre"
    )
    assert not outer


def test_indices_of_a_row_are_judged_behind_its_loop():
    """No branch in the loop, which LLVM could not vectorise; what is reported is the value that was fed."""
    made = function(
        (8, 16), "int64", lambda table, fed, i, j: table(i, checked_index(fed(i, j), 16, "Gather")), 8
    )
    safe = scheduled(made)
    loops: list[tirx.For] = []
    tvm_ffi.structural_walk(safe.function.body, (tirx.For, loops.append))
    innermost = []
    for loop in loops:
        inside: list[object] = []
        tvm_ffi.structural_walk(loop.body, ((tirx.For, tirx.IfThenElse), inside.append))
        innermost += [loop] if not inside else []
    assert len(innermost) == 2
    columns = np.random.default_rng(0).integers(-16, 16, (8, 16))
    result, faults = run(safe, TABLE, columns)
    np.testing.assert_array_equal(result, np.take_along_axis(TABLE, columns % 16, 1))
    assert not faults.any()
    for value in (16, -17, 2**63 - 1, -(2**63)):
        wrong = columns.copy()
        wrong[5, 3] = value
        assert run(safe, TABLE, wrong)[1].tolist() == [[1, value]]


@pytest.mark.parametrize("fed", [0, 5, 8, 9, -3, 2**31 - 1])
def test_loop_whose_end_is_fed_stays_inside(fed):
    """Within its limit no access is changed; without one each is."""
    for limit in (8, None):
        table, count, out = (
            tirx.decl_buffer(index_shape(s), d)
            for s, d in (((8, 16), "float32"), ((1,), "int32"), ((8, 16), "float32"))
        )
        end = tirx.BufferLoad(count, [tirx.const(0, "int64")]).astype("int64")
        end = end if limit is None else tirx.min(end, tirx.const(limit, "int64"))
        i, zero = tirx.Var("i", "int64"), tirx.const(0, "int64")
        body = tirx.BufferStore(out, tirx.BufferLoad(table, [i, zero]), [i, zero])
        # without a limit no loop of the greatest length
        end = end if limit else tirx.Select(end > tirx.const(100, "int64"), tirx.const(100, "int64"), end)
        made = tirx.PrimFunc([table, count, out], tirx.For(i, zero, end, tirx.ForKind.SERIAL, body))
        safe = made_safe(Scheduled(made, "test"))
        result, _ = run(safe, TABLE, np.array([fed], np.int32))
        rows = min(max(fed, 0), 8)
        np.testing.assert_array_equal(result[:rows, 0], TABLE[:rows, 0])
        assert not result[rows:].any() and not result[:, 1:].any()
        is_changed = "T.min(i" in safe.function.script() or "T.max(T.min(i" in safe.function.script()
        assert is_changed == (limit is None)
