"""Kernels for several sizes of their data read their weights in one layout, whatever tiles they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tvm.relax import op

from hybridc.passes.precision.integer_functions import int8_matmul
from hybridc.schedules.blocked_operators import ConvWindow, blocked_conv2d, blocked_grouped_conv2d
from hybridc.schedules.cpu.conv2d.conv2d import conv2d
from hybridc.schedules.cpu.conv2d_blocked.conv2d_blocked import conv2d_blocked
from hybridc.schedules.cpu.low_precision.int8_matmul import int8_matmul as int8_rule
from hybridc.schedules.cpu.matmul.matmul import matmul
from hybridc.schedules.cpu.winograd.winograd import winograd
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Rule, Scheduled
from hybridc.targets import ISAS
from tests.schedules.cpu.conftest import Harness
from tests.schedules.cpu.matmul.test_read import composed

AssertClose = Callable[[np.ndarray, np.ndarray], None]
ONE = ConvWindow((1, 1), (1, 1, 1, 1), (1, 1))


@pytest.fixture
def many(costly_harness: Harness) -> Harness:
    return replace(costly_harness, many_sizes=True)


def packing_of(scheduled: Scheduled) -> Packing:
    [(position, packing)] = scheduled.packings
    assert position == 1
    return packing


def normal(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.standard_normal(shape, dtype=np.float32) for shape in shapes]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [3, 133])
def test_products_of_all_rows_read_one_matrix(
    many: Harness, assert_close: AssertClose, columns: int, transposed: bool
) -> None:
    found = set()
    for rows in (1, 7, 41):
        shapes = (rows, 24), (columns, 24) if transposed else (24, columns)
        function = composed(
            lambda emit, a, b: emit(op.matmul(a, emit(op.permute_dims(b)) if transposed else b)), shapes
        )
        scheduled = many.schedule(function, [1], matmul)
        found.add(packing_of(scheduled))
        a, b = normal(*shapes)
        (result,) = many.run(function, scheduled, [a, b])
        assert_close(result, a.astype("f8") @ (b.T if transposed else b).astype("f8"))
    assert len(found) == 1


def test_large_products_leave_their_matrix_as_small_ones_read_it(avx2: Harness) -> None:
    def product(rows: int) -> Packing:
        function = avx2.function(lambda emit, a, b: emit(op.matmul(a, b)), [(rows, 1024), (1024, 1024)])
        is_combined = packing_of(avx2.schedule(function, [1], matmul)).combined is not None
        assert is_combined == (rows > 1)  # by Strassen's algorithm
        return packing_of(replace(avx2, many_sizes=True).schedule(function, [1], matmul))

    assert product(1) == product(512)


@pytest.mark.isa("avx512_bf16_emulated")
def test_integer_products_of_all_rows_read_one_matrix() -> None:
    many, found = Harness(ISAS["avx512_bf16_emulated"], many_sizes=True), set()
    for rows in (1, 5, 30):
        x, w = (np.random.default_rng(1).integers(0, 100, s, t) for s, t in (
            ((rows, 21), "uint8"), ((21, 70), "int8")))  # fmt: skip
        function = int8_matmul(x.shape, w.shape, "uint8", 0)
        scheduled = many.schedule(function, [1], int8_rule)
        found.add(packing_of(scheduled))
        (result,) = many.run(function, scheduled, [x, w])
        np.testing.assert_array_equal(result, x.astype("i8") @ w.astype("i8"))
    assert len(found) == 1


def convolved(data: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """In float64, blocked, with padding of one."""
    padded = np.pad(data.astype("f8"), ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = data.shape[2:4]
    return sum(
        np.einsum("nbyxi,obip->noyxp", padded[:, :, y : y + rows, x : x + columns],
                  weight[:, :, y, x].astype("f8"), optimize=True)
        for y in range(3) for x in range(3)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "sizes"), [(conv2d_blocked, ((1, 5), (2, 9))), (winograd, ((12, 9), (40, 9)))]
)
def test_convolutions_of_all_images_read_one_weight(
    many: Harness, assert_close: AssertClose, rule: Rule, sizes: tuple[tuple[int, int], ...]
) -> None:
    found, widths, lanes = set(), set(), 16
    for number, side in sizes:
        shapes = (number, 2, side, side, lanes), (3, 2, 3, 3, lanes, lanes)
        function = blocked_conv2d(*shapes, ONE)
        scheduled = many.schedule(function, [1], rule)
        found.add(packing_of(scheduled))
        widths.add(scheduled.choices[0])
        data, weight = normal(*shapes)
        (result,) = many.run(function, scheduled, [data, weight])
        assert_close(result, convolved(data, weight))
    assert len(found) == 1 and len(widths) > 1


def test_one_image_takes_the_transformed_weights_of_many_unless_much_slower(avx2: Harness) -> None:
    def packing(images: int, side: int, *, many_sizes: bool) -> Packing:
        function = blocked_conv2d((images, 64, side, side, 8), (64, 64, 3, 3, 8, 8), ONE)
        return packing_of(replace(avx2, threads=2, many_sizes=many_sizes).schedule(function, [1]))

    assert packing(1, 7, many_sizes=False) != packing(32, 7, many_sizes=False)
    assert packing(1, 7, many_sizes=True) == packing(32, 7, many_sizes=True)
    assert packing(1, 2, many_sizes=True) != packing(32, 2, many_sizes=True)


@pytest.mark.parametrize(("count", "inputs", "outputs"), [(2, 16, 32), (8, 4, 4)])
def test_grouped_convolutions_of_all_images_read_one_weight(
    many: Harness, assert_close: AssertClose, count: int, inputs: int, outputs: int
) -> None:
    found, blocks = set(), count * inputs // 16
    for images, side in ((1, 3), (4, 9)):
        shapes = (images, blocks, side, side, 16), (count * outputs, inputs, 3, 3)
        function = blocked_grouped_conv2d(*shapes, ONE, outputs, 16)
        scheduled = many.schedule(function, [1], conv2d_blocked)
        found.add(packing_of(scheduled))
        data, weight = normal(*shapes)
        (result,) = many.run(function, scheduled, [data, weight])
        plain = data.transpose(0, 1, 4, 2, 3).reshape(images, count, inputs, side, side)
        filters = weight.reshape(count, outputs, inputs, 3, 3)
        padded = np.pad(plain.astype("f8"), ((0, 0),) * 3 + ((1, 1),) * 2)
        wanted = sum(
            np.einsum("ngcyx,goc->ngoyx", padded[..., y : y + side, x : x + side], filters[..., y, x])
            for y in range(3) for x in range(3)
        )  # fmt: skip
        blocked = wanted.reshape(images, -1, 16, side, side).transpose(0, 1, 3, 4, 2)
        assert_close(result, blocked)
    assert len(found) == 1


def test_plain_convolutions_of_all_images_read_one_weight(avx2: Harness) -> None:
    def packing(images: int, *, many_sizes: bool) -> Packing:
        shapes = [(images, 8, 5, 6), (20, 8, 3, 3)]
        function = avx2.function(lambda emit, x, w: emit(op.nn.conv2d(x, w, padding=1)), shapes)
        harness = replace(avx2, threads=16, many_sizes=many_sizes)
        return packing_of(harness.schedule(function, [1], conv2d))

    numbers = (1, 3, 16, 50)
    assert len({packing(n, many_sizes=False) for n in numbers}) > 1
    assert len({packing(n, many_sizes=True) for n in numbers}) == 1
