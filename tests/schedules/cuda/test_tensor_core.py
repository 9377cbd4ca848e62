"""Products on tensor cores: right for every shape and type, and faults in them do not go unnoticed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import relax, te, tirx
from tvm.relax import op

from hybridc import emulator
from hybridc.codegen.cuda import compile_cubin
from hybridc.emulator import ThreadOrder
from hybridc.gpu_model.expressions import evaluate
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.memory import wavefronts
from hybridc.gpu_model.tir import work_of_function
from hybridc.ir import Device
from hybridc.machine import gpu_named
from hybridc.options import FP16
from hybridc.schedules.channels_last import with_channels_last
from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cuda.core.launch import MAX_SHARED_BYTES, cuda_target, lowered_for_gpu
from hybridc.schedules.cuda.tensor_core import tensor_core
from hybridc.schedules.cuda.tensor_core.cost import fastest_way, main_work, overlapping_way, shared_bytes
from hybridc.schedules.cuda.tensor_core.gathered import Gathered
from hybridc.schedules.cuda.tensor_core.instructions import TF32
from hybridc.schedules.cuda.tensor_core.operands import operand
from hybridc.schedules.cuda.tensor_core.packing import packed
from hybridc.schedules.cuda.tensor_core.read import Axis, Element, read_matrix_product
from hybridc.schedules.cuda.tensor_core.staging import Operand
from hybridc.schedules.cuda.tensor_core.tile import TILES, Tile, Way
from hybridc.schedules.rule import PRECISION, Request, Scheduled
from hybridc.schedules.select import schedule
from hybridc.schedules.storage import stored
from hybridc.targets import Target, parse_target
from tests.schedules.cuda import references as ref
from tests.schedules.cuda.tensor_cores import TARGET, computed, names_to_run, unedited
from tests.schedules.cuda.tensor_cores import built as built_library
from tests.support.fusion import fused_operators

Array = NDArray[np.float64]
HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
DTYPES = {**HALVES, TF32: np.dtype(np.float32)}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, TF32: 2.0**-24}
"""Of results."""
RNG = np.random.default_rng(19)


def to_tf32(x: Array) -> Array:
    """The nearest numbers of 11 significant bits, ties away from zero."""
    fraction, exponent = np.frexp(x)
    scaled = np.ldexp(fraction, 11)
    return np.ldexp(np.sign(scaled) * np.floor(np.abs(scaled) + 0.5), exponent - 11)


@dataclass(frozen=True)
class Case:
    """A product of two tensors, a bias and ReLU, or the product alone."""

    name: str
    product: Callable[[relax.Expr, relax.Expr], relax.Expr]
    reference: Callable[[Array, Array], Array]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float16"
    way: Way | None = None
    known_weights: bool = False
    """When compiling."""
    rounded: int | None = None
    """Which operand is float32 in memory, and rounded to float16 on its way to tensor cores."""
    last: frozenset[str] = frozenset()
    """Which of `data` and `result` have channels last in memory."""

    @property
    def constants(self) -> frozenset[int]:
        names = [str(p.name) for p in self.function().params]
        return frozenset({names.index("p1")} if self.known_weights else ())

    def function(self) -> tirx.PrimFunc:
        function = self.in_float32()
        names = [str(p.name) for p in function.params]
        places = {"data": names.index("p0"), "result": len(names) - 1}
        if self.last:
            function = with_channels_last(function, {places[name] for name in self.last})
        if self.dtype == TF32:
            return function.with_attr(PRECISION, TF32)
        narrow = [i for i, name in enumerate(names) if name != f"p{self.rounded}"]
        made = stored(function, dict.fromkeys(narrow, self.dtype))
        return made if self.rounded is None else made.with_attr(PRECISION, FP16)

    def drawn(self) -> list[NDArray[Any]]:
        """Inputs in the types that they have in memory."""
        rng, dtype = np.random.default_rng(1), DTYPES[self.dtype]
        drawn = [rng.standard_normal(shape) for shape in self.shapes]
        return [x.astype(np.float32 if i == self.rounded else dtype) for i, x in enumerate(drawn)]

    def multiplied(self, inputs: list[NDArray[Any]]) -> list[Array]:
        """The numbers that tensor cores multiply, and what is added to their sums."""
        wide = [x.astype(np.float64) for x in inputs]
        if self.dtype == TF32:
            wide[:2] = [to_tf32(x) for x in wide[:2]]
        if self.rounded is not None:
            wide[self.rounded] = wide[self.rounded].astype(np.float16).astype(np.float64)
        return wide

    def in_float32(self) -> tirx.PrimFunc:
        def build(emit: Callable[[relax.Expr], relax.Var], *inputs: relax.Var) -> relax.Expr:
            total = self.product(inputs[0], inputs[1])
            return op.nn.relu(emit(op.add(emit(total), inputs[2]))) if len(inputs) > 2 else total

        return fused_operators(build, self.shapes)

    def expected(self, *inputs: Array) -> Array:
        total = self.reference(inputs[0], inputs[1])
        return np.maximum(total + inputs[2], 0) if len(inputs) > 2 else total

    def tolerance(self, inputs: list[Array]) -> Array:
        """The result is rounded once; float32 sums err by less than a term's share of rounding for each."""
        sizes = [np.abs(x) for x in inputs]
        terms = self.reference(sizes[0], sizes[1])
        size = terms + (sizes[2] if len(sizes) > 2 else 0)
        return ROUNDING[self.dtype] * np.abs(self.expected(*inputs)) + 64 * 2.0**-24 * size + 2.0**-24


class Transposed(Case):
    """`x @ w.T`, which Relax does not fuse."""

    def in_float32(self) -> tirx.PrimFunc:
        (m, depth), (n, _) = ([tirx.IntImm("int64", e) for e in shape] for shape in self.shapes)
        x, w = te.placeholder((m, depth), name="p0"), te.placeholder((n, depth), name="p1")
        k = te.reduce_axis((0, depth), "k")
        return te.create_prim_func([x, w, te.compute((m, n), lambda i, j: te.sum(x[i, k] * w[j, k], axis=k))])


def matrices(name: str, *shapes: tuple[int, ...], dtype: str = "float16", way: Way | None = None) -> Case:
    return Case(name, op.matmul, lambda x, w: x @ w, shapes, dtype, way)


def convolution(
    name: str,
    *shapes: tuple[int, ...],
    dtype: str = "float16",
    way: Way | None = None,
    known_weights: bool = False,
    rounded: int | None = None,
    **settings: int,
) -> Case:
    relax_settings = {"strides" if key == "stride" else key: value for key, value in settings.items()}
    shapes = (*shapes, (1, shapes[1][0], *(1,) * (len(shapes[0]) - 2)))
    conv = op.nn.conv2d if len(shapes[0]) == 4 else op.nn.conv1d
    return Case(
        name,
        lambda x, w: conv(x, w, **relax_settings),
        lambda x, w: ref.conv(x, w, **settings),
        shapes,
        dtype,
        way,
        known_weights,
        rounded,
    )


def drawn_cases() -> list[Case]:
    """Shapes with tails in every direction, a tile each."""
    found = []
    for number, tile in enumerate(TILES):
        m, n, k = (int(v) for v in RNG.integers(9, 150, 3))
        if number % 3 == 0:
            k = 8 * (k // 8 + 1)
        if number % 2:
            n = 8 * (n // 8 + 1)
        for dtype in (("float16", "bfloat16")[number % 2], TF32):
            name = f"drawn_{number}_{dtype}"
            found.append(matrices(name, (m, k), (k, n), (n,), dtype=dtype, way=Way(tile)))
    return found


def copied_cases() -> list[Case]:
    """Asynchronous copies: of one operand or both, of every width, of few slices, and with tails."""
    rng, found = np.random.default_rng(43), []
    for number, tile in enumerate(TILES):
        m, n, k = (int(v) for v in rng.integers(9, 200, 3))
        unit = (8, 4, 2, 1)[number % 4]
        k, n = unit * (k // unit + 1), 8 * (n // 8 + 1) if number % 3 else n
        stages = 2 + number % 3 if tile.rows + tile.columns <= 192 else 2 + number % 2
        name, dtype = f"copied_{m}x{k}x{n}_{stages}", ("float16", "bfloat16")[number % 2]
        found.append(matrices(name, (m, k), (k, n), (n,), dtype=dtype, way=Way(tile, 1, stages)))
    small = TILES[-1]
    return [
        *found,
        matrices("copied_one_slice", (16, 24), (24, 40), way=Way(small, 1, 4)),
        matrices("copied_in_parts", (33, 256), (256, 56), (56,), way=Way(small, 4, 3)),
        matrices("copied_batched", (2, 3, 17, 72), (2, 3, 72, 24), way=Way(small, 1, 3)),
        Transposed(
            "copied_across", op.matmul, lambda x, w: x @ w.T, ((40, 104), (33, 104)), way=Way(small, 1, 3)
        ),
        convolution("conv_copied_pointwise", (2, 72, 8, 8), (24, 72, 1, 1), way=Way(small, 1, 3)),
        convolution(
            "conv_copied_weights",
            (2, 64, 9, 9),
            (23, 64, 3, 3),
            way=Way(small, 2, 3),
            known_weights=True,
            padding=1,
        ),
    ]


def of_tf32() -> list[Case]:
    """Both operands along the depth and across it, in 128 bits and one by one."""
    small = TILES[-1]
    return [
        matrices("tf32_slice", (16, 12), (12, 40), dtype=TF32),
        matrices("tf32_batched", (2, 3, 17, 40), (2, 3, 40, 19), dtype=TF32),
        Transposed("tf32_transposed", op.matmul, lambda x, w: x @ w.T, ((40, 56), (33, 56)), TF32),
        matrices("tf32_deep", (33, 130), (130, 52), (52,), dtype=TF32, way=Way(small, 3)),
        convolution("conv_tf32", (2, 17, 9, 9), (23, 17, 3, 3), padding=1, dtype=TF32),
        convolution("conv_tf32_stem", (1, 3, 22, 22), (16, 3, 7, 7), stride=2, padding=3, dtype=TF32),
        convolution("conv_tf32_pointwise", (2, 40, 8, 8), (24, 40, 1, 1), dtype=TF32),
        convolution(
            "conv_tf32_known",
            (1, 32, 6, 7),
            (16, 32, 3, 3),
            way=Way(small, 6),
            known_weights=True,
            dtype=TF32,
        ),
        convolution("conv_tf32_1d", (2, 9, 70), (12, 9, 5), padding=4, dilation=2, dtype=TF32),
    ]


def gathered_cases() -> list[Case]:
    """Windows, and lines of odd lengths, of which a thread loads single elements: a tile each, with tails."""
    rng, found = np.random.default_rng(61), []
    for number, tile in enumerate(TILES):
        images, channels, size, taps = (int(v) for v in rng.integers((1, 9, 5, 1), (4, 70, 16, 4)))
        rows, dtype = int(rng.integers(9, 140)), ("float16", "bfloat16")[number % 2]
        name = f"conv_gathered_{images}x{channels}x{size}x{rows}x{taps}"
        data, weight = (images, channels, size, size + 2), (rows, channels, taps, taps)
        found.append(
            convolution(
                name, data, weight, dtype=dtype, way=Way(tile), stride=1 + number % 2, padding=taps // 2
            )
        )
    small = TILES[-1]
    return [
        *found,
        convolution("conv_gathered_lines", (1, 64, 7, 7), (40, 64, 1, 1), way=Way(small, 2)),
        convolution(
            "conv_gathered_copied", (1, 64, 7, 7), (40, 64, 1, 1), known_weights=True, way=Way(small, 1, 3)
        ),
        convolution("conv_gathered_taps", (2, 32, 9, 9), (24, 32, 5, 5), known_weights=True, stride=2),
        convolution(
            "conv_taps_of_chunks", (1, 24, 11, 9), (20, 24, 5, 5), known_weights=True, padding=2, stride=2
        ),
        convolution("conv_deep_weights", (1, 3, 21, 21), (16, 3, 5, 5), known_weights=True, padding=2),
    ]


def grouped_cases() -> list[Case]:
    """Groups are a batch: with tails, parts of the depth, rounded data, and channels that no tile divides."""
    small = TILES[-1]
    return [
        convolution("conv_groups", (2, 48, 9, 7), (34, 24, 3, 3), groups=2, padding=1),
        convolution(
            "conv_groups_known", (2, 96, 7, 7), (54, 32, 3, 3), groups=3, padding=1, known_weights=True
        ),
        convolution("conv_groups_deep", (1, 96, 6, 7), (120, 32, 3, 3), groups=3, way=Way(small, 3)),
        convolution("conv_groups_wide", (1, 48, 13, 13), (256, 24, 5, 5), groups=2, padding=2, stride=2),
        convolution("conv_groups_pointwise", (2, 64, 4, 8), (64, 16, 1, 1), groups=4, dtype="bfloat16"),
        convolution("conv_groups_rounded", (1, 18, 11, 9), (36, 9, 3, 3), groups=2, rounded=0),
        convolution("conv_groups_1d", (2, 24, 70), (48, 12, 5), groups=2, padding=2, known_weights=True),
    ]


def rounded_cases() -> list[Case]:
    """One operand in float32: windows, lines of 128 bits and less, along the depth and across it."""
    small = TILES[-1]
    known = [
        convolution("conv_rounded_stem", (1, 3, 22, 22), (16, 3, 7, 7), stride=2, padding=3),
        convolution("conv_rounded_patches", (2, 3, 32, 48), (40, 3, 16, 16), stride=16),
        convolution("conv_rounded_grey", (2, 1, 13, 11), (23, 1, 3, 3), padding=1),
    ]
    return [
        *(replace(case, known_weights=True, rounded=0) for case in known),
        convolution("conv_rounded_pointwise", (1, 40, 8, 8), (24, 40, 1, 1), rounded=0),
        convolution("conv_rounded_1d", (2, 9, 70), (12, 9, 5), padding=4, rounded=0),
        *(
            replace(matrices(f"rounded_{side}_{m}x{k}x{n}", (m, k), (k, n), (n,), way=way), rounded=side)
            for (m, k, n), way in (
                ((37, 130, 72), None),
                ((33, 128, 50), Way(small, 4)),
                ((70, 64, 136), Way(TILES[0])),
                ((40, 96, 72), Way(small, 1, 3)),
            )
            for side in (0, 1)
        ),
    ]


def channels_last_cases() -> list[Case]:
    """Rows or columns are pixels: each way to have one tensor or both so, channels that are taken eight, four
    and one at a time, of which slices have whole taps or not, with and without copies, and tails."""
    rng, found = np.random.default_rng(97), []
    both = ("data", "result")
    for number, tile in enumerate(TILES):
        images, size, taps, stride = (int(v) for v in rng.integers((1, 5, 1, 1), (4, 14, 4, 3)))
        channels = int(rng.choice([8, 24, 32, 40, 64, 20, 17])) if number else 32
        rows, dtype = int(rng.integers(9, 140)), ("float16", "bfloat16", TF32)[number % 3]
        last = (both, both[:1], both[1:])[number % 3 if number < 3 else int(rng.integers(3))]
        case = convolution(
            f"conv_last_{images}x{channels}x{size}x{rows}x{taps}_{'_'.join(last)}_{dtype}",
            (images, channels, size, size + 3),
            (rows, channels, taps, taps),
            dtype=dtype,
            way=Way(tile),
            known_weights=number % 4 < 3,
            stride=stride,
            padding=taps // 2,
        )
        found.append(replace(case, last=frozenset(last)))
    small = TILES[-1]
    copied = [
        convolution(
            "conv_last_copied",
            (2, 32, 9, 7),
            (40, 32, 3, 3),
            padding=1,
            way=Way(small, 1, 3),
            known_weights=True,
        ),
        convolution(
            "conv_last_parts", (1, 64, 6, 7), (24, 64, 3, 3), way=Way(small, 6, 2), known_weights=True
        ),
        convolution(
            "conv_last_taps",
            (2, 24, 9, 7),
            (40, 24, 3, 3),
            padding=1,
            way=Way(small, 1, 3),
            known_weights=True,
        ),
        convolution(
            "conv_last_dilated", (1, 40, 12, 12), (16, 40, 3, 3), dilation=2, padding=2, known_weights=True
        ),
        convolution("conv_last_pointwise", (2, 72, 8, 8), (24, 72, 1, 1), way=Way(small, 1, 3)),
        convolution("conv_last_strided", (1, 16, 8, 12), (24, 16, 1, 1), stride=2),
        convolution("conv_last_fed_weights", (1, 32, 9, 9), (24, 32, 3, 3), padding=1),
    ]
    return [*found, *(replace(case, last=frozenset(both)) for case in copied)]


CASES = {
    case.name: case
    for case in (
        *drawn_cases(),
        matrices("one_slice", (16, 24), (24, 40)),
        matrices("many_rows", (3, 37, 64), (64, 72), (72,)),
        matrices("batched", (2, 3, 17, 40), (2, 3, 40, 19), dtype="bfloat16"),
        Transposed("transposed", op.matmul, lambda x, w: x @ w.T, ((40, 56), (33, 56))),
        matrices("deep", (33, 130), (130, 50), (50,), way=Way(Tile(32, 32, 16, 16), 5)),
        matrices("deep_batched", (2, 20, 128), (2, 128, 16), way=Way(Tile(32, 32, 16, 16), 2)),
        convolution("conv_deep", (1, 32, 5, 5), (16, 32, 3, 3), padding=1, way=Way(Tile(32, 32, 16, 16), 3)),
        convolution("conv_known", (2, 32, 9, 9), (23, 32, 3, 3), padding=1, stride=2, known_weights=True),
        convolution(
            "conv_known_deep", (1, 64, 6, 7), (16, 64, 3, 3), way=Way(TILES[-1], 6), known_weights=True
        ),
        convolution(
            "conv_known_1d", (2, 32, 70), (40, 32, 5), dtype="bfloat16", dilation=2, known_weights=True
        ),
        convolution("conv", (2, 17, 9, 9), (23, 17, 3, 3), padding=1),
        convolution("conv_stem", (1, 3, 22, 22), (16, 3, 7, 7), stride=2, padding=3),
        convolution("conv_pointwise", (2, 40, 8, 8), (24, 40, 1, 1), dtype="bfloat16"),
        convolution("conv_strided", (1, 16, 8, 12), (24, 16, 1, 1), stride=2),
        convolution("conv_dilated", (1, 8, 12, 12), (16, 8, 3, 3), dilation=2, padding=2, way=Way(TILES[0])),
        convolution("conv_1d", (2, 9, 70), (12, 9, 5), padding=4, dilation=2),
        *of_tf32(),
        *copied_cases(),
        *gathered_cases(),
        *rounded_cases(),
        *grouped_cases(),
        *channels_last_cases(),
    )
}


def on_tensor_cores(case: Case) -> Scheduled:
    with computed(case.way):
        scheduled = schedule(Request(case.function(), case.constants, TARGET), Device.GPU)
    assert scheduled is not None
    return scheduled


@dataclass
class Built:
    """Scheduled functions in a library for the emulated GPU, and their source."""

    scheduled: Mapping[str, Scheduled]
    library: tvm.runtime.Module
    source: str

    def is_right(self, case: Case, order: ThreadOrder = ThreadOrder.FORWARD) -> bool:
        emulator.start(1 << 30, thread_order=order)
        device, inputs = tvm.cuda(0), case.drawn()
        original = case.function()
        names = [int(str(p.name).removeprefix("p")) for p in original.params[: len(inputs)]]
        scheduled = self.scheduled[case.name]
        rest = scheduled.function.params[len(inputs) :]
        fresh = [tvm.runtime.empty([int(e) for e in p.shape], str(p.dtype), device) for p in rest]
        fed = [inputs[i] for i in names]
        if "data" in case.last:
            fed[names.index(0)] = np.ascontiguousarray(np.moveaxis(inputs[0], 1, -1))
        for position, packing in scheduled.packings:
            fed[position] = packing.apply(fed[position])
        self.library[case.name](*(tvm.runtime.tensor(x, device) for x in fed), *fresh)
        device.sync()
        wide = case.multiplied(inputs)
        found = fresh[0].numpy().astype(np.float64)
        if "result" in case.last:
            found = np.moveaxis(found, -1, 1)
        return bool((np.abs(found - case.expected(*wide)) <= case.tolerance(wide)).all())


def build(cases: list[Case], edit: Callable[[str], str] = unedited) -> Built:
    scheduled = {case.name: on_tensor_cores(case) for case in cases}
    return Built(scheduled, *built_library(scheduled, edit))


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Built:
    """Of the cases that are to run, or of all where none is named: each takes seconds to compile."""
    chosen = names_to_run(request, test_products_are_those_of_float64)
    return build([case for name, case in CASES.items() if name in chosen or not chosen])


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_float64(name: str, built: Built) -> None:
    case = CASES[name]
    assert built.scheduled[name].rule == f"tensor_core_{'conv' if name.startswith('conv') else 'matmul'}"
    for order in (ThreadOrder.WARPS, ThreadOrder.SHUFFLED):
        assert built.is_right(case, order)


@pytest.mark.parametrize("architecture", ["sm_80", pytest.param("sm_90", marks=pytest.mark.slow)])
def test_nvidias_compiler_takes_every_kernel(architecture: str, built: Built) -> None:
    compile_cubin(built.source, architecture)


def test_turing_has_float16_only() -> None:
    turing = parse_target("cuda:sm_75,sm_86+avx2")
    functions = [matrices("m", (64, 64), (64, 64), dtype=dtype).function() for dtype in HALVES]
    half, brain = (schedule(Request(f, frozenset(), turing), Device.GPU) for f in functions)
    assert half is not None and half.rule == "tensor_core_matmul"
    assert brain is None


def test_small_groups_are_left_to_float32() -> None:
    case = convolution("c", (1, 64, 9, 9), (64, 8, 3, 3), groups=8)
    made = schedule(Request(case.function(), frozenset(), TARGET), Device.GPU)
    assert made is not None and made.rule == "conv2d"


def test_known_weights_are_packed() -> None:
    assert on_tensor_cores(CASES["conv_known"]).packings
    assert on_tensor_cores(CASES["conv_groups_known"]).packings
    # a thread's part of a slice has one tap where there are whole chunks of channels
    assert [p.axes for _, p in on_tensor_cores(CASES["conv_taps_of_chunks"]).packings] == [(0, 2, 3, 1)]
    assert not on_tensor_cores(replace(CASES["conv"], known_weights=True)).packings
    # of 75 along the depth each row begins elsewhere in a line, of 16 output channels none does
    ((_, packing),) = on_tensor_cores(CASES["conv_deep_weights"]).packings
    assert packing.axes == (1, 2, 3, 0)


@pytest.mark.parametrize("name", ["conv_last_copied", "conv_last_taps", "conv_last_dilated"])
def test_channels_of_a_pixel_are_copied_together(name: str) -> None:
    """Whether slices of the depth have whole taps or not."""
    case = CASES[name]
    product = read_matrix_product(case.function(), tf32=False)
    assert product is not None
    product, packings = packed(product, case.constants)
    data, weights = (
        operand(product, side, product.batch.at(integer(0)), 32, 128) for side in ("left", "right")
    )
    assert packings and data.along_depth and weights.along_depth
    assert data.width == weights.width == 8
    assert data.can_be_copied and weights.can_be_copied


def test_float32_is_left_to_others() -> None:
    function = fused_operators(lambda emit, x, w: op.matmul(x, w), ((64, 64), (64, 64)))
    assert tensor_core.tensor_core_matmul(Request(function, frozenset(), TARGET)) is None
    # nor is one rounded that the function reads in 32 bits
    mixed = stored(function, {0: "float16", 2: "float16"})
    assert tensor_core.tensor_core_matmul(Request(mixed, frozenset(), TARGET)) is None
    # unless rounding all that it reads was measured, as in a network that is compiled for fp16
    reduced = Request(mixed.with_attr(PRECISION, FP16), frozenset(), TARGET)
    assert tensor_core.tensor_core_matmul(reduced) is not None


def fault(stages: int) -> Case:
    """Six slices of both operands, which asynchronous copies move if there are `stages`."""
    return matrices("fault", (64, 192), (192, 64), way=Way(Tile(64, 64, 32, 32), 1, stages))


def is_right_without(case: Case, pattern: str, number: int, instead: str = "") -> bool:
    """Whether a case is right in every order of threads without a call, the `number`-th that matches."""

    def edited(source: str) -> str:
        match = list(re.finditer(pattern, source))[number]
        return source[: match.start()] + instead + source[match.end() :]

    faulty = build([case], edited)
    return all(faulty.is_right(case, order) for order in ThreadOrder)


@pytest.mark.parametrize("stages", [0, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3))])
def test_a_missing_barrier_shows(stages: int) -> None:
    case = fault(stages)
    assert len(re.findall(r"__syncthreads\(\);", build([case]).source)) == 1
    assert not is_right_without(case, r"__syncthreads\(\);", 0)


@pytest.mark.parametrize("stages", [*(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4)), 3])
def test_a_missing_wait_shows(stages: int) -> None:
    case = fault(stages)
    wait = rf"await_copies\({stages - 2}\);"
    assert len(re.findall(wait, build([case]).source)) == 1
    assert not is_right_without(case, wait, 0)
    assert not is_right_without(case, wait, 0, f"await_copies({stages - 1});")


def test_a_missing_commit_shows() -> None:
    case = fault(3)
    commits = len(re.findall(r"commit_copies\(\);", build([case]).source))
    assert commits == 3  # of the first two slices, and of each turn
    assert not all(is_right_without(case, r"commit_copies\(\);", number) for number in range(commits))
    assert not is_right_without(case, r"commit_copies\(\);", commits - 1)


def test_a_wrong_swizzle_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Operand):
        def offset(self, line: tirx.Var, at: tirx.Var) -> tirx.Var:
            return line * self.line + at

    read = Operand.fragments

    def unrotated(self: Operand, *arguments: object, **settings: object) -> tirx.Stmt:
        values = {field.name: getattr(self, field.name) for field in fields(Operand)}
        return read(Plain(**values), *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Operand, "fragments", unrotated)
    for stages in (0, 3):
        assert not build([fault(stages)]).is_right(fault(stages))


def test_elements_that_are_not_rounded_show() -> None:
    case = matrices("fault", (64, 96), (96, 64), dtype=TF32)
    assert build([case]).is_right(case)
    assert not build([case], lambda source: re.sub(r"round_tf32\(.*?\);", "", source)).is_right(case)


@pytest.mark.parametrize("line", [32, 64, 128])
def test_lanes_read_elements_of_32_bits_from_all_banks(line: int) -> None:
    axis = Axis((), ())
    row, at = tirx.Var("row", "int64"), tirx.Var("at", "int64")
    load = tirx.BufferLoad(tirx.decl_buffer((1,), "float32"), [0])
    part = Operand("x", Element((), load), row, row, at, axis, axis, line, 16, 128, False, 4, item_bytes=4)
    lanes = np.arange(32)
    every = np.ones((1, 32), bool)
    offset, quads = part.offset(row, at), line // 4
    loads = evaluate(offset, {row: lanes % 4, at: lanes // 4})[None] * 4
    stores = evaluate(offset, {row: lanes // quads, at: lanes % quads * 4})[None] * 4
    assert (wavefronts(loads, 4, every) == 1).all()
    assert (wavefronts(stores, 16, every) == 4).all()


def drawn_products() -> list[Case]:
    rng = np.random.default_rng(31)
    sizes = [tuple(int(v) for v in 8 * (2 ** rng.uniform(1, 7, 3)).round()) for _ in range(6)]
    return [matrices(f"{m}x{k}x{n}", (m, k), (k, n), dtype=TF32) for m, k, n in sizes]


@pytest.mark.parametrize("gpu", ["rtx-3090", "a100"])
def test_closed_form_follows_the_lowered_loops(gpu: str) -> None:
    processor = gpu_named(gpu)
    for case in (*drawn_products(), CASES["conv_tf32_pointwise"], CASES["conv_tf32_known"]):
        request = Request(case.function(), case.constants, TARGET, gpu=processor)
        product = tensor_core.read_tf32_product(request)
        assert product is not None
        product, _ = tensor_core.packed(product, request.own_constants)
        way, us = fastest_way(product, processor)
        made = schedule(request, Device.GPU)
        assert made is not None
        works = work_of_function(lowered_for_gpu(made.function, cuda_target(TARGET)))
        lowered = sum(estimate_fast(work, processor).us for work in works)
        assert us == pytest.approx(lowered + (way.parts > 1) * processor.next_launch_us, rel=0.15, abs=1.0)


def test_tf32_where_it_is_faster_than_float32() -> None:
    def is_faster(case: Case, gpu: str) -> bool:
        request = Request(case.function(), case.constants, TARGET, gpu=gpu_named(gpu))
        product = tensor_core.read_tf32_product(request)
        assert product is not None
        return tensor_core.tf32_is_faster(product, request)

    # of an A100 tensor cores multiply eight times as fast, of a GeForce as fast as its other pipes
    small = convolution("c", (1, 64, 56, 56), (64, 64, 3, 3), padding=1, known_weights=True, dtype=TF32)
    assert is_faster(small, "a100") and not is_faster(small, "rtx-3090")
    assert is_faster(matrices("m", (2048, 2048), (2048, 2048), dtype=TF32), "rtx-3090")


def test_tf32_is_asked_for() -> None:
    case = matrices("m", (64, 64), (64, 64), dtype=TF32)
    turing = parse_target("cuda:sm_75,sm_86+avx2")
    for function, target in ((case.function(), turing), (case.in_float32(), TARGET)):
        made = schedule(Request(function, frozenset(), target), Device.GPU)
        assert made is not None and made.rule == "matmul"


@pytest.mark.parametrize("line", [32, 64, 128])
def test_shared_memory_has_no_bank_conflicts(line: int) -> None:
    axis = Axis((), ())
    row, chunk = tirx.Var("row", "int64"), tirx.Var("chunk", "int64")
    load = tirx.BufferLoad(tirx.decl_buffer((1,), "float32"), [0])
    part = Operand(
        "x", Element((), load), row, row, chunk, axis, axis, line, 32, 128, along_depth=False, width=8
    )
    offset = part.offset(row, chunk * 8)
    lanes = np.arange(32)
    every = np.ones((1, 32), bool)
    # ldmatrix reads eight rows at a time; eight threads store neighbouring chunks
    loads = evaluate(offset, {row: lanes % 8, chunk: 0 * lanes})[None] * 2
    stores = evaluate(offset, {row: lanes // (line // 8), chunk: lanes % (line // 8)})[None] * 2
    assert len(set((loads[0, :8] // 16 % 8).tolist())) == 8
    assert (wavefronts(stores, 16, every) == 4).all()


@pytest.mark.parametrize("extent", [32, 64, 128])
def test_single_elements_are_stored_without_bank_conflicts(extent: int) -> None:
    axis, threads, item_bytes = Axis((), ()), 128, 2
    row, at, thread = (tirx.Var(name, "int64") for name in ("row", "at", "thread"))
    load = tirx.BufferLoad(tirx.decl_buffer((1,), "float32"), [0])
    part = Gathered(
        "x", Element((), load), row, row, at, axis, axis, extent, 32, threads, True, 1, item_bytes
    )
    lanes, every = np.arange(32), np.ones((1, 32), bool)
    position, depth = (evaluate(place, {thread: lanes}) for place in part.piece(integer(0), thread))
    assert (np.diff(position) == 1).all() and len(set(np.atleast_1d(depth).tolist())) == 1
    stores = evaluate(part.offset(row, at), {row: position, at: depth})[None] * item_bytes
    assert (wavefronts(stores, part.lines * item_bytes, every) == part.lines * item_bytes // 4).all()


def test_ways_suit_shapes() -> None:
    def way_of(case: Case) -> Way:
        product = read_matrix_product(case.function(), tf32=False)
        assert product is not None
        return overlapping_way(product, gpu_named("rtx-3090"))

    large = way_of(matrices("large", (4096, 4096), (4096, 4096)))
    assert large.parts == 1 and large.tile.rows * large.tile.columns >= 64 * 64
    # 32 tiles of 32 x 32 would leave most of a large GPU idle
    deep = way_of(convolution("deep", (1, 512, 7, 7), (512, 512, 3, 3), padding=1))
    assert deep.parts > 1 and 4608 // 32 % deep.parts == 0
    # 197 rows are seven tiles of 32, and four of 64, of which 59 would be padding
    assert way_of(matrices("tokens", (197, 768), (768, 3072))).tile.rows == 32
    # each tile loads lines of which it needs every second element: wide ones load fewer
    strided = convolution("strided", (1, 1024, 14, 14), (2048, 1024, 1, 1), stride=2)
    assert way_of(strided).tile.columns == 64
    for tile in TILES:
        assert tile.threads == 128


@pytest.mark.parametrize(
    ("gpu", "target", "copies"),
    [("a100", TARGET, True), ("rtx-3090", TARGET, False), ("a100", parse_target("cuda:sm_75+avx2"), False)],
)
def test_few_blocks_of_fast_tensor_cores_copy_ahead(gpu: str, target: Target, copies: bool) -> None:
    request = Request(
        matrices("m", (208, 280), (280, 80)).function(), frozenset(), target, gpu=gpu_named(gpu)
    )
    made = schedule(request, Device.GPU)
    assert made is not None and ("copy_async_16" in str(made.function)) is copies


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_closed_form_follows_lowered_copies(stages: int) -> None:
    processor = gpu_named("a100")
    for tile in (TILES[1], TILES[3], TILES[-1]):
        case = matrices("m", (520, 776), (776, 1032), (1032,), way=Way(tile, 1, stages))
        product = read_matrix_product(case.function(), tf32=False)
        assert product is not None and case.way is not None
        sides = [
            operand(product, name, product.batch.at(integer(0)), extent, tile.threads)
            for name, extent in (("left", tile.rows), ("right", tile.columns))
        ]
        if shared_bytes(product, case.way) > MAX_SHARED_BYTES:
            continue
        counted = main_work(product, case.way, sides[0], sides[1])
        [work] = work_of_function(lowered_for_gpu(on_tensor_cores(case).function, cuda_target(TARGET)))
        assert work.shared_bytes == counted.shared_bytes
        found, us = (estimate_fast(w, processor).us for w in (counted, work))
        # the lowered function's sides are ragged, and its first copies lie in front of the loop
        assert found == pytest.approx(us, rel=0.3)
