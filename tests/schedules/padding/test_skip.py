"""Scheduled functions that leave out padding: what is real is right, and most of the rest is not touched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx, topi

from hybridc.codegen.cpu import cpu_module
from hybridc.codegen.flat import flattened
from hybridc.ir import Device
from hybridc.schedules.packing import Packing
from hybridc.schedules.padding.elements import OpenAxis, inner_extents
from hybridc.schedules.padding.skip import skips_padding, with_sizes
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.select import schedule
from hybridc.schedules.shapes import index_shape
from hybridc.targets import parse_target

TARGET = parse_target("avx2")
LLVM = tvm.target.Target({"kind": "llvm", "mcpu": "haswell"})
UNTOUCHED = -77.0
BATCH, ROWS, WIDTH = 4, 96, 64
pytestmark = pytest.mark.isa("avx2")


def placeholders(*shapes: tuple[int, ...]) -> list[te.Tensor]:
    return [te.placeholder(index_shape(shape), "float32", f"x{i}") for i, shape in enumerate(shapes)]


def product() -> tuple[list[te.Tensor], te.Tensor]:
    a, b = placeholders((BATCH, ROWS, WIDTH), (WIDTH, WIDTH))
    return [a, b], topi.nn.relu(topi.nn.matmul(a, b))


def product_of_groups() -> tuple[list[te.Tensor], te.Tensor]:
    """With an axis that is always whole behind those of the rows."""
    a, b, c = placeholders((BATCH, ROWS, 2, WIDTH), (WIDTH, WIDTH), (BATCH, ROWS, 2, WIDTH))
    return [a, b, c], topi.add(topi.nn.matmul(a, b), c)


def elements() -> tuple[list[te.Tensor], te.Tensor]:
    a, b = placeholders((BATCH, ROWS, WIDTH), (BATCH, ROWS, WIDTH))
    return [a, b], topi.add(topi.sigmoid(a), b)


def softmax() -> tuple[list[te.Tensor], te.Tensor]:
    [a] = placeholders((BATCH, ROWS, WIDTH))
    return [a], topi.nn.softmax(a)


def heads() -> tuple[list[te.Tensor], te.Tensor]:
    """[BATCH, heads, ROWS, 16] from [BATCH, ROWS, heads, 16]."""
    [a] = placeholders((BATCH, ROWS, WIDTH // 16, 16))
    return [a], topi.transpose(a, (0, 2, 1, 3))


CASES: dict[str, tuple[Callable[[], tuple[list[te.Tensor], te.Tensor]], int]] = {
    "product": (product, 1),
    "product of groups": (product_of_groups, 1),
    "elements": (elements, 1),
    "softmax": (softmax, 1),
    "heads": (heads, 2),
}
"""A function, and which axis of its result has the rows; the batch is axis 0."""


def drawn(name: str, seed: int) -> tuple[tirx.PrimFunc, list[np.ndarray]]:
    """A function, and operands for it."""
    inputs, result = CASES[name][0]()
    random = np.random.default_rng(seed)
    arrays = [random.standard_normal([int(n) for n in x.shape]).astype(np.float32) for x in inputs]
    return te.create_prim_func([*inputs, result]), arrays


def opened(
    function: tirx.PrimFunc, rows_axis: int, *, open_dimensions: bool = False
) -> tuple[Scheduled, bool]:
    made = schedule(Request(function, frozenset(), TARGET, open_dimensions=open_dimensions), Device.CPU)
    assert made is not None
    shape = [int(n) for n in function.params[-1].shape]
    inner = inner_extents(shape)
    axes = [OpenAxis(inner[0], BATCH, "batch"), OpenAxis(inner[rows_axis], ROWS, "rows")]
    return with_sizes(made, len(function.params) - 1, [axes], ["batch", "rows"])


def run(function: tirx.PrimFunc, arrays: list[np.ndarray], sizes: tuple[int, int] | None) -> np.ndarray:
    """The result, in memory that was `UNTOUCHED`; with two sizes behind the inputs."""
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    fed = [*arrays, *(np.array([size]) for size in sizes or ())]
    rest = [np.full([int(n) for n in p.shape], UNTOUCHED, str(p.dtype)) for p in function.params[len(fed) :]]
    tensors = [tvm.runtime.tensor(each) for each in (*fed, *rest)]
    tvm.compile(module, target=LLVM)["main"](*tensors)
    return tensors[len(fed)].numpy()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [(1, 5), (2, 48), (4, 96), (3, 1)])
def test_what_is_real_is_right_and_most_padding_is_left(name: str, sizes: tuple[int, int]) -> None:
    (_, rows_axis), (function, arrays) = CASES[name], drawn(name, 0)
    whole = schedule(Request(function, frozenset(), TARGET), Device.CPU)
    assert whole is not None
    expected = run(whole.function, arrays, None)
    sized, skips = opened(function, rows_axis)
    assert skips and skips_padding(sized.function) and not skips_padding(whole.function)
    found = run(sized.function, arrays, sizes)
    real = np.zeros(found.shape, bool)
    index: list[slice] = [slice(None)] * found.ndim
    index[0], index[rows_axis] = slice(sizes[0]), slice(sizes[1])
    real[tuple(index)] = True
    np.testing.assert_array_equal(found[real], expected[real])
    assert np.all((found == expected) | (found == UNTOUCHED))
    computed = (found != UNTOUCHED).mean()
    share = sizes[0] * sizes[1] / (BATCH * ROWS)
    assert computed <= share + 0.2 or share == 1


@pytest.mark.parametrize("name", ["product", "product of groups"])
@pytest.mark.parametrize("sizes", [(1, 5), (3, 33), (4, 95), (4, 96), (3, 1), (2, 1)])
def test_rows_of_a_product_are_those_of_the_run_alone(name: str, sizes: tuple[int, int]) -> None:
    function, arrays = drawn(name, 1)
    whole = schedule(Request(function, frozenset(), TARGET), Device.CPU)
    named = schedule(Request(function, frozenset(), TARGET, open_dimensions=True), Device.CPU)
    assert whole is not None and named is not None and named.rows and not whole.rows
    expected = run(whole.function, arrays, None)
    np.testing.assert_array_equal(run(named.function, arrays, None), expected)  # as it is measured
    sized, skips = opened(function, 1, open_dimensions=True)
    assert skips
    found = run(sized.function, arrays, sizes)
    np.testing.assert_array_equal(found[: sizes[0], : sizes[1]], expected[: sizes[0], : sizes[1]])
    found[: sizes[0], : sizes[1]] = UNTOUCHED
    assert np.all(found == UNTOUCHED)


def product_of_any_rows(batch: int, rows: int, width: int) -> tuple[tirx.PrimFunc, Packing]:
    """Of rows [batch, rows, width] and a weight, and how that is packed."""
    a, b = placeholders((batch, rows, width), (width, width))
    function = te.create_prim_func([a, b, topi.nn.matmul(a, b)])
    request = Request(function, frozenset({1}), TARGET, many_sizes=True, open_dimensions=True)
    made = schedule(request, Device.CPU)
    assert made is not None
    inner = inner_extents([batch, rows, width])
    axes = [OpenAxis(inner[0], batch, "batch"), OpenAxis(inner[1], rows, "rows")]
    sized, skips = with_sizes(made, 2, [axes], ["batch", "rows"])
    assert skips
    return sized.function, dict(sized.packings)[1]


@pytest.mark.parametrize("sizes", [(2, 81), (1, 1), (7, 512), (8, 512)])
def test_threads_share_the_groups_of_rows_that_a_run_has(sizes: tuple[int, int]) -> None:
    batch, rows, width = 8, 512, 256
    function, packing = product_of_any_rows(batch, rows, width)
    loops: list[tirx.For] = []
    tvm_ffi.structural_walk(function.body, (tirx.For, loops.append))
    [shared] = [loop for loop in loops if loop.kind == tirx.ForKind.PARALLEL]
    assert isinstance(shared.extent, tirx.Min) and not shared.annotations
    random = np.random.default_rng(0)
    given, weight = (
        random.standard_normal(shape, np.float32) for shape in ((batch, rows, width), (width,) * 2)
    )
    found, real = run(function, [given, packing.apply(weight)], sizes), (slice(sizes[0]), slice(sizes[1]))
    np.testing.assert_allclose(found[real], given[real] @ weight, rtol=1e-3, atol=1e-3)
    found[real] = UNTOUCHED
    assert np.all(found == UNTOUCHED)


def test_rows_of_the_run_leave_the_sums_in_registers() -> None:
    """What numbers of rows follow from is not computed in the inner loop, which has no register to spare."""
    function, _ = product_of_any_rows(8, 8, 768)
    named = {"main": function.with_attrs({"global_symbol": "main", "target": LLVM})}
    assembly = cpu_module(flattened(named), LLVM).inspect_source("asm").splitlines()
    products = [number for number, line in enumerate(assembly) if "vfmadd" in line]
    assert products
    inside = assembly[products[0] : products[-1]]
    assert not [line for line in inside if "ymm" in line and "(%rsp)" in line]


@pytest.mark.parametrize("sizes", [(3, 33), (4, 96), (1, 1)])
def test_rows_may_take_the_place_of_what_is_added_to_them(sizes: tuple[int, int]) -> None:
    """No row is computed twice where a tile has more than are left."""
    function, arrays = drawn("product of groups", 2)
    sized, _ = opened(function, 1, open_dimensions=True)
    module = tvm.IRModule({"main": sized.function.with_attr("global_symbol", "main")})
    fed = [tvm.runtime.tensor(each) for each in (*arrays, *(np.array([size]) for size in sizes))]
    rest = [np.zeros([int(n) for n in p.shape], str(p.dtype)) for p in sized.function.params[len(fed) + 1 :]]
    tvm.compile(module, target=LLVM)["main"](*fed, fed[2], *map(tvm.runtime.tensor, rest))
    real = slice(sizes[0]), slice(sizes[1])
    expected = arrays[0] @ arrays[1] + arrays[2]
    np.testing.assert_allclose(fed[2].numpy()[real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(0, 5), (-1, -1), (2**40, 7), (5, 2**62)])
def test_sizes_that_no_session_gives_lead_no_access_elsewhere(sizes: tuple[int, int]) -> None:
    function, arrays = drawn("product", 3)
    sized, _ = opened(function, 1, open_dimensions=True)
    found, expected = run(sized.function, arrays, sizes), run(sized.function, arrays, (BATCH, ROWS))
    inside = [min(max(size, 1), bound) for size, bound in zip(sizes, (BATCH, ROWS), strict=True)]
    real = slice(inside[0]), slice(inside[1])
    np.testing.assert_array_equal(found[real], expected[real])
    found[real] = UNTOUCHED
    assert np.all(found == UNTOUCHED)


def test_a_result_that_is_not_padded_is_computed_whole() -> None:
    inputs, result = elements()
    function = te.create_prim_func([*inputs, result])
    made = schedule(Request(function, frozenset(), TARGET), Device.CPU)
    assert made is not None
    _, skips = with_sizes(made, 2, [[]], ["rows"])
    assert not skips


def test_an_intermediate_that_other_loops_read_is_computed_whole() -> None:
    """Of means of all rows only what follows each row's own could be left out."""
    [a] = placeholders((BATCH, ROWS, WIDTH))
    total = topi.sum(a, axis=1, keepdims=True)
    function = te.create_prim_func([a, topi.subtract(a, total)])
    random = np.random.default_rng(0)
    array = random.standard_normal((BATCH, ROWS, WIDTH)).astype(np.float32)
    made, _ = opened(function, 1)
    found = run(made.function, [array], (BATCH, 9))
    expected = array - array.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found[:, :9], expected[:, :9], rtol=1e-4, atol=1e-4)
