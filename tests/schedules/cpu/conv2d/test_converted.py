"""Plain convolutions that are computed in blocks, against a float64 loop over taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, te, tirx
from tvm.relax import op

from hybridc.schedules.blocked_operators import extents, sum_over
from hybridc.schedules.cpu.conv2d_blocked.conv2d_blocked import conv2d_blocked
from hybridc.schedules.cpu.conv2d_blocked.depthwise import depthwise_blocked
from hybridc.schedules.cpu.conv2d_blocked.read import read_blocked_convolution
from hybridc.schedules.cpu.conv2d_converted.conv2d_converted import conv2d_converted
from hybridc.schedules.cpu.conv2d_converted.depthwise_converted import depthwise_converted
from hybridc.schedules.cpu.conv2d_converted.kernel import Blocking, Way, converted
from hybridc.schedules.cpu.conv2d_converted.read import read_plain_convolution
from hybridc.schedules.cpu.conv2d_converted.winograd_converted import winograd_converted
from hybridc.schedules.cpu.winograd.winograd import candidates, schedule_plan
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Rule, Scheduled
from hybridc.targets import ISAS, Target, missing_flags
from tests.schedules.cpu.conftest import Harness
from tests.schedules.cpu.conv2d.test_conv2d import reference_conv

AssertClose = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Case:
    """A convolution of images; `taps` and `stride` are the same along both axes."""

    data: tuple[int, int, int, int]
    outputs: int
    taps: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def weight(self) -> tuple[int, ...]:
        return self.outputs, self.data[1] // self.groups, self.taps, self.taps

    @property
    def window(self) -> tuple[int, int, int, int]:
        return self.stride, self.padding, self.dilation, self.groups

    def convolution(self, emit: Callable[..., relax.Expr], x: relax.Expr, w: relax.Expr) -> relax.Expr:
        stride, padding, dilation, groups = self.window
        return emit(op.nn.conv2d(x, w, strides=stride, padding=padding, dilation=dilation, groups=groups))

    def expected(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return reference_conv(x.astype("f8"), w.astype("f8"), *self.window)


def forced(rule: Way, lanes: int, inputs: int | None = None) -> Way:
    """Blocks of so many lanes, whatever is predicted to be faster."""

    def schedule(request: Request) -> Scheduled | None:
        plain = read_plain_convolution(request)
        assert plain is not None
        return converted(request, Blocking(plain, lanes, inputs), rule, "converted")

    return schedule


def any_winograd(request: Request) -> Scheduled | None:
    """Winograd's algorithm, whatever its rule takes for faster."""
    conv, isa = read_blocked_convolution(request), request.target.isa
    assert conv is not None
    return schedule_plan(request, conv, next(candidates(conv, isa)))


WAYS: dict[str, tuple[Way, bool]] = {
    "direct": (conv2d_blocked, False),
    "direct, blocked data": (conv2d_blocked, True),
    "winograd": (any_winograd, True),
    "depthwise": (depthwise_blocked, True),
}
CASES: list[tuple[str, Case]] = [
    ("direct", Case((1, 5, 9, 7), 19, padding=0)),
    ("direct", Case((2, 3, 16, 16), 40, 5, 2, 2)),
    ("direct", Case((1, 24, 17, 15), 16, 1, 1, 0)),
    ("direct", Case((2, 7, 20, 13), 33, 1, 2, 0)),
    ("direct", Case((1, 6, 12, 40), 8, 3, 1, 2, 2)),
    ("direct, blocked data", Case((1, 24, 18, 11), 21, 3, 2, 1)),
    ("winograd", Case((2, 16, 14, 13), 24)),
    ("winograd", Case((1, 40, 9, 32), 72, padding=0)),
    ("depthwise", Case((1, 16, 15, 14), 16, groups=16)),
    ("depthwise", Case((2, 24, 13, 9), 24, 5, 2, 2, groups=24)),
]


def scheduled_case(
    harness: Harness, way: str, case: Case, function: tirx.PrimFunc, constants: Sequence[int]
) -> Scheduled:
    rule, reads_blocks = WAYS[way]
    lanes = harness.isa.lanes()
    if way == "depthwise":
        lanes = next(n for n in (lanes, lanes // 2) if case.data[1] % n == 0)
    inputs = next((n for n in (lanes, lanes // 2, lanes // 4) if case.data[1] % n == 0), 1)
    request = Request(function, frozenset(constants), Target((), harness.isa), threads=harness.threads)
    scheduled = forced(rule, lanes, inputs if reads_blocks else None)(request)
    assert scheduled is not None
    return scheduled


def normal(*shapes: Sequence[int]) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.standard_normal(shape, dtype=np.float32) for shape in shapes]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("way", "case"), CASES, ids=str)
def test_convolution_with_bias_residual_and_relu_matches_float64(
    harness: Harness, assert_close: AssertClose, way: str, case: Case, constant: bool
) -> None:
    x, w = normal(case.data, case.weight)
    expected = case.expected(x, w)
    bias, residual = normal((1, case.outputs, 1, 1), expected.shape)

    def build(emit, x, w, b, r):
        y = emit(op.add(case.convolution(emit, x, w), b))
        return emit(op.nn.relu(emit(op.add(y, r))))

    inputs = [x, w, bias, residual]
    function = harness.function(build, [a.shape for a in inputs])
    scheduled = scheduled_case(harness, way, case, function, [1] if constant else [])
    assert len(scheduled.packings) == constant
    (result,) = harness.run(function, scheduled, inputs)
    assert_close(result, np.maximum(expected + bias + residual, 0))
    in_place = [packed(scheduled, 1, w) if i == 1 else a for i, a in enumerate(inputs)]
    np.testing.assert_array_equal(harness.run_in_place(scheduled, in_place, 3), result)


@pytest.mark.parametrize("way", ["direct, blocked data", "winograd"])
def test_a_strip_of_an_image_is_read_where_it_lies(
    harness: Harness, assert_close: AssertClose, way: str
) -> None:
    """As tiles are: rows 5 to 17 of the data, with zeros beside them and above them."""
    case, first, rows = Case((1, 24, 40, 15), 20), 5, 12
    x, w = normal(case.data, case.weight)
    strip = np.pad(x[:, :, first : first + rows].astype("f8"), ((0, 0), (0, 0), (1, 0), (1, 1)))
    expected = reference_conv(strip, w.astype("f8"), 1, 0, 1, 1)

    def padded(n: te.Var, c: te.Var, y: te.Var, z: te.Var) -> te.Expr:
        inside = tirx.all(y >= 1, z >= 1, z < 16)
        return tirx.if_then_else(inside, data[n, c, y + (first - 1), z - 1], tirx.const(0, "float32"))

    data, weight = (
        te.placeholder(extents(*shape), "float32", name)
        for shape, name in ((case.data, "x"), (case.weight, "w"))
    )
    image = te.compute(extents(1, 24, rows + 1, 17), padded, name="pad")
    c, a, b = (sum_over(extent, name) for extent, name in ((24, "c"), (3, "a"), (3, "b")))
    out = te.compute(
        extents(*expected.shape),
        lambda n, o, y, z: te.sum(image[n, c, y + a, z + b] * weight[o, c, a, b], axis=[c, a, b]),
    )
    function = te.create_prim_func([data, weight, out])
    (result,) = harness.run(function, scheduled_case(harness, way, case, function, [1]), [x, w])
    assert_close(result, expected)


def packed(scheduled: Scheduled, position: int, array: np.ndarray) -> np.ndarray:
    packing = dict(scheduled.packings).get(position)
    return array if packing is None else packing.apply(array)


@given(
    batch=st.integers(1, 2),
    channels=st.integers(1, 40),
    outputs=st.integers(1, 40),
    rows=st.integers(4, 19),
    columns=st.integers(4, 19),
    taps=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
    isa=st.sampled_from(["avx2", "avx512"]),
)
def test_drawn_convolutions_match_float64(
    batch: int, channels: int, outputs: int, rows: int, columns: int, taps: int, stride: int, isa: str
) -> None:
    if missing_flags(ISAS[isa]):
        return
    case = Case((batch, channels, rows, columns), outputs, taps, stride, taps // 2)
    x, w = normal(case.data, case.weight)
    expected, harness = case.expected(x, w), Harness(ISAS[isa])
    if expected[0, 0].size < harness.isa.lanes():
        return
    function = harness.function(lambda emit, x, w: case.convolution(emit, x, w), [case.data, case.weight])
    ways = ["direct"]
    if taps == 3 and stride == 1 and channels % 4 == 0:
        ways.append("winograd")
    for way in ways:
        (result,) = harness.run(function, scheduled_case(harness, way, case, function, [1]), [x, w])
        assert np.abs(result - expected).max() <= 1e-5 * max(np.abs(expected).max(), 1.0)


def chosen(
    rule: Rule, case: Case, isa: str = "avx2", *, winograd: bool = True, many_sizes: bool = False
) -> Scheduled | None:
    harness = Harness(ISAS[isa])
    function = harness.function(lambda emit, x, w: case.convolution(emit, x, w), [case.data, case.weight])
    target = Target((), ISAS[isa])
    return rule(Request(function, frozenset([1]), target, winograd=winograd, many_sizes=many_sizes))


def test_the_way_is_chosen_by_predicted_time() -> None:
    deep = Case((1, 256, 14, 14), 256)
    assert chosen(winograd_converted, deep) is not None
    assert chosen(winograd_converted, deep, winograd=False) is None
    assert chosen(winograd_converted, replace(deep, stride=2)) is None
    pointwise = Case((1, 256, 14, 14), 512, 1, padding=0)
    assert chosen(conv2d_converted, pointwise) is not None
    # a vector of output channels would be mostly padding
    assert chosen(conv2d_converted, Case((1, 16, 64, 64), 2, 1, padding=0), "avx512") is None
    assert chosen(depthwise_converted, Case((1, 32, 14, 14), 32, groups=32)) is not None
    assert chosen(depthwise_converted, Case((1, 30, 14, 14), 30, groups=30)) is None


def test_what_has_no_kernel_in_blocks_is_refused() -> None:
    for rule in (conv2d_converted, winograd_converted, depthwise_converted):
        assert chosen(rule, Case((1, 64, 14, 14), 64, groups=4)) is None
        assert chosen(rule, Case((1, 64, 2, 3), 64)) is None  # no square of pixels and channels


@pytest.mark.parametrize("rule", [conv2d_converted, winograd_converted])
def test_kernels_of_all_sizes_read_one_weight(rule: Rule) -> None:
    sizes = ((4, 64, 14, 14), (1, 64, 30, 30), (8, 64, 56, 56))
    found = [chosen(rule, Case(data, 64), many_sizes=True) for data in sizes]
    assert len({made.packings for made in found if made is not None}) == 1 and None not in found


def test_an_array_may_be_laid_out_before_it_is_packed() -> None:
    first = Packing((4, 6), (2, 2, 6), (0, 2, 1))
    second = Packing((3, 6, 2), (3, 3, 2, 2), (1, 0, 2, 3), before=first)
    array = np.arange(20, dtype="f4").reshape(4, 5)
    np.testing.assert_array_equal(second.apply(array), replace(second, before=None).apply(first.apply(array)))
