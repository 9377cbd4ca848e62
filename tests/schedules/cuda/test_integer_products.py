"""Products of 8-bit integers on tensor cores: exact for every shape, sign and way to load operands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from hybridc import emulator
from hybridc.codegen.cuda import compile_cubin
from hybridc.emulator import ThreadOrder
from hybridc.gpu_model.chip import chip_of
from hybridc.gpu_model.expressions import evaluate
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.memory import wavefronts
from hybridc.gpu_model.tir import work_of_function
from hybridc.ir import Device
from hybridc.machine import gpu_named
from hybridc.passes.precision.integer_functions import int8_matmul, int8_plain_conv2d
from hybridc.schedules.blocked_operators import ConvWindow
from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cuda.core.launch import cuda_target, lowered_for_gpu
from hybridc.schedules.cuda.tensor_core.cost import fastest_way
from hybridc.schedules.cuda.tensor_core.gathered import Gathered
from hybridc.schedules.cuda.tensor_core.packing import packed
from hybridc.schedules.cuda.tensor_core.read import Axis, Element, read_matrix_product
from hybridc.schedules.cuda.tensor_core.staging import Operand
from hybridc.schedules.cuda.tensor_core.tile import TILES, Way
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.select import schedule
from hybridc.targets import parse_target
from tests.schedules.cuda import references as ref
from tests.schedules.cuda.tensor_cores import TARGET, computed, names_to_run, unedited
from tests.schedules.cuda.tensor_cores import built as built_library
from tests.support.fusion import fused_calls

SMALL = TILES[-1]


@dataclass(frozen=True)
class Case:
    """Sums of products, or with `requantized` 8 bits made of them."""

    name: str
    sums: Callable[[], tirx.PrimFunc]
    reference: Callable[[np.ndarray, np.ndarray], np.ndarray]
    way: Way | None = None
    known_weights: bool = True
    requantized: bool = False

    def function(self) -> tirx.PrimFunc:
        return _requantized(self.sums()) if self.requantized else self.sums()

    def expected(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        sums = self.reference(x.astype(np.float64), w.astype(np.float64))
        assert np.abs(sums).max() < 2**31
        if not self.requantized:
            return sums.astype(np.int32)
        scaled = np.float32(SCALE) * (sums.astype(np.int32) + OFFSET).astype(np.float32)
        return np.clip(np.round(np.maximum(scaled, 0)) + 3, 0, 255).astype(np.uint8)


SCALE, OFFSET = 0.0021, 77


def _requantized(sums: tirx.PrimFunc) -> tirx.PrimFunc:
    """As the passes fuse it: offset, scale, ReLU, 8 bits."""
    types = [relax.TensorType([int(e) for e in p.shape], str(p.dtype)) for p in sums.params]
    builder = relax.BlockBuilder()

    def build(x: relax.Var, w: relax.Var) -> relax.Expr:
        function = builder.add_func(sums.without_attr("global_symbol"), "anchor")
        y = builder.emit(relax.call_tir(function, [x, w], types[2]))
        y = builder.emit(relax.op.add(y, relax.const(OFFSET, "int32")))
        y = builder.emit(relax.op.multiply(relax.op.astype(y, "float32"), relax.const(SCALE, "float32")))
        y = builder.emit(relax.op.nn.relu(y))
        zero = relax.const(3, "uint8")
        return relax.op.quantize(y, relax.const(1.0, "float32"), zero, out_dtype="uint8")

    return fused_calls(builder, types[:2], build)


def matrices(
    left: tuple[int, ...],
    columns: int,
    dtype: str = "uint8",
    way: Way | None = None,
    added: int = 0,
    **settings: bool,
) -> Case:
    name = f"matmul_{'x'.join(map(str, left))}x{columns}_{dtype}_{added}_{way and way.stages}"
    right = left[-1], columns
    return Case(
        name,
        lambda: int8_matmul(left, right, dtype, added),
        lambda x, w: (x + added) @ w,
        way,
        **settings,
    )


def convolution(
    data: tuple[int, ...],
    weight: tuple[int, ...],
    dtype: str = "uint8",
    way: Way | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    zero: int = 0,
    **settings: bool,
) -> Case:
    window = ConvWindow((stride, stride), (padding,) * 4, (dilation, dilation))

    def reference(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        spatial = (padding, padding)
        padded = np.pad(x, ((0, 0), (0, 0), spatial, spatial), constant_values=zero)
        return ref.conv(padded, w, stride=stride, dilation=dilation)

    name = f"conv_{'x'.join(map(str, (*data, *weight)))}_{dtype}_{stride}_{padding}_{dilation}"
    sums = lambda: int8_plain_conv2d(data, weight, window, dtype, zero)  # noqa: E731
    return Case(name, sums, reference, way, **settings)


def drawn_cases() -> Iterator[Case]:
    """Shapes with tails in every direction, a tile each, with and without asynchronous copies."""
    rng = np.random.default_rng(7)
    for number, tile in enumerate(TILES):
        m, n, k = (int(v) for v in rng.integers(9, 200, 3))
        unit = (16, 8, 4, 1)[number % 4]
        k, n = unit * (k // unit + 1), 4 * (n // 4 + 1) if number % 2 else n
        dtype, added = (("uint8", 0), ("int8", 0), ("int8", 128))[number % 3]
        stages = (0, 2, 3)[number % 3] if tile.rows + tile.columns <= 128 else 0
        yield matrices((m, k), n, dtype, Way(tile, 1, stages), added, known_weights=number != 4)
        c, o, size = (int(v) for v in rng.integers(9, 60, 3))
        c = 16 * (c // 16 + 1) if number % 2 else c
        yield convolution(
            (1 + number % 2, c, size // 3 + 3, size // 2 + 3),
            (o, c, 3, 3),
            dtype,
            Way(tile),
            stride=1 + number % 3 // 2,
            padding=number % 3,
            dilation=1 + number % 2,
            zero=(0, 131)[number % 2] if dtype == "uint8" else -5,
        )


CASES = {
    case.name: case
    for case in (
        *drawn_cases(),
        matrices((2, 3, 17, 64), 24, requantized=True),
        matrices((33, 256), 52, "int8", Way(SMALL, 4, 3), 128),
        matrices((40, 128), 72, way=Way(SMALL, 1, 4), known_weights=False),
        convolution((2, 40, 8, 8), (24, 40, 1, 1), "int8", requantized=True),
        convolution((2, 72, 7, 7), (24, 72, 1, 1), way=Way(TILES[3])),
        convolution((1, 64, 14, 14), (72, 64, 1, 1), way=Way(TILES[0])),
        convolution((1, 64, 12, 12), (72, 64, 1, 1), way=Way(TILES[2], 1, 2), requantized=True),
        matrices((150, 128), 136, "int8", Way(TILES[0], 1, 2), 128, requantized=True),
        matrices((70, 128), 36, way=Way(TILES[4], 1, 3), requantized=True),
        convolution((1, 3, 22, 22), (16, 3, 7, 7), stride=2, padding=3, zero=128, requantized=True),
        convolution((1, 64, 6, 7), (16, 64, 3, 3), "int8", Way(SMALL, 3, 3), padding=1, zero=4),
    )
}


def on_tensor_cores(case: Case) -> Scheduled:
    constants = frozenset({1} if case.known_weights else ())
    with computed(case.way):
        scheduled = schedule(Request(case.function(), constants, TARGET), Device.GPU)
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
        device, rng = tvm.cuda(0), np.random.default_rng(1)
        inputs = []
        for parameter in case.function().params[:2]:
            limits = np.iinfo(str(parameter.dtype))
            shape = [int(e) for e in parameter.shape]
            inputs.append(rng.integers(limits.min, limits.max + 1, shape).astype(limits.dtype))
        scheduled, fed = self.scheduled[case.name], list(inputs)
        for position, packing in scheduled.packings:
            fed[position] = packing.apply(fed[position])
        rest = scheduled.function.params[2:]
        fresh = [tvm.runtime.empty([int(e) for e in p.shape], str(p.dtype), device) for p in rest]
        self.library[case.name](*(tvm.runtime.tensor(x, device) for x in fed), *fresh)
        device.sync()
        return np.array_equal(fresh[0].numpy(), case.expected(*inputs))


def build(cases: list[Case], edit: Callable[[str], str] = unedited) -> Built:
    scheduled = {case.name: on_tensor_cores(case) for case in cases}
    return Built(scheduled, *built_library(scheduled, edit))


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Built:
    """Of the cases that are to run, or of all where none is named."""
    chosen = names_to_run(request, test_products_are_exact)
    return build([case for name, case in CASES.items() if name in chosen or not chosen])


@pytest.mark.parametrize("name", CASES)
def test_products_are_exact(name: str, built: Built) -> None:
    case = CASES[name]
    assert built.scheduled[name].rule in ("tensor_core_matmul", "tensor_core_conv")
    for order in (ThreadOrder.WARPS, ThreadOrder.SHUFFLED):
        assert built.is_right(case, order)


def test_nvidias_compiler_takes_every_kernel(built: Built) -> None:
    compile_cubin(built.source, "sm_80")


def deep(stages: int) -> Case:
    """Six slices of operands that lie along the depth, which asynchronous copies move if there are
    `stages`."""
    return matrices((64, 384), 64, way=Way(TILES[3], 1, stages))


GATHERED = {
    "words": convolution((1, 192, 8, 8), (32, 192, 1, 1), way=Way(TILES[3])),
    "bytes": convolution((1, 32, 9, 9), (32, 32, 3, 3), padding=1, way=Way(TILES[3])),
}


def is_right_without(case: Case, pattern: str, instead: str = "") -> bool:
    """Whether a case is right in every order of threads without what matches."""
    found: list[int] = []

    def edited(source: str) -> str:
        source, count = re.subn(pattern, instead, source)
        found.append(count)
        return source

    faulty = build([case], edited)
    assert found[0] >= 1
    return all(faulty.is_right(case, order) for order in ThreadOrder)


@pytest.mark.parametrize(
    ("case", "pattern", "instead"),
    [
        (deep(3), r"await_copies\(1\);", ""),
        (deep(3), r"await_copies\(1\);", "await_copies(2);"),
        (deep(3), r"__syncthreads\(\);", ""),
        (GATHERED["words"], r"__syncthreads\(\);", ""),
        (GATHERED["words"], r"transpose_bytes\(.*?, \d+\);", ""),
        (GATHERED["bytes"], r"mma_m16n8k32_s8_u8", "mma_m16n8k32_s8_s8"),
    ],
)
def test_faults_show(case: Case, pattern: str, instead: str) -> None:
    assert not is_right_without(case, pattern, instead)


def test_what_the_faults_are_in_is_right() -> None:
    cases = [replace(deep(3), name="copied"), replace(GATHERED["words"], name="words"), GATHERED["bytes"]]
    right = build(cases)
    assert all(right.is_right(case, order) for case in cases for order in ThreadOrder)


def test_nvidias_compiler_takes_kernels_for_turing() -> None:
    cases = [replace(case, name=name) for name, case in GATHERED.items()]
    compile_cubin(build(cases).source, "sm_75")


def test_a_wrong_swizzle_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Operand.fragments

    def other(self: Operand, *arguments: Any, **settings: Any) -> tirx.Stmt:
        values = {field.name: getattr(self, field.name) for field in fields(Operand)}
        return read(Operand(**{**values, "in_pairs": False}), *arguments, **settings)

    monkeypatch.setattr(Gathered, "fragments", other)
    assert not build([GATHERED["words"]]).is_right(GATHERED["words"])


@pytest.mark.parametrize(("extent", "width"), [(128, 4), (64, 4), (32, 4), (128, 1), (32, 1)])
def test_bytes_are_stored_and_read_without_bank_conflicts(extent: int, width: int) -> None:
    axis, threads = Axis((), ()), 128
    row, at, thread = (tirx.Var(name, "int64") for name in ("row", "at", "thread"))
    load = tirx.BufferLoad(tirx.decl_buffer((1,), "uint8"), [0])
    part = Gathered(
        "x", Element((), load), row, row, at, axis, axis, extent, 64, threads, True, width, 1, "uint8",
        in_pairs=width == 4,
    )  # fmt: skip
    offset, lanes, every = part.offset(row, at), np.arange(32), np.ones((1, 32), bool)
    # columns of an instruction, of four, or of two whose pairs lie side by side
    for neighbours in (1, 4, 2) if width == 4 else (1,):
        for first in range(0, extent, 8 * neighbours):
            for number in range(neighbours):
                column = lanes % 8 // 2 * 2 * neighbours + 2 * number + lanes % 2
                read = evaluate(offset, {row: first + column, at: lanes // 8 * 16})
                assert all(len(set((read[i : i + 8] // 16 % 8).tolist())) == 8 for i in range(0, 32, 8))
    position, depth = (evaluate(place, {thread: lanes}) for place in part.piece(integer(0), thread))
    for step in range(width):
        stores = evaluate(offset, {row: position + step, at: depth})[None]
        assert (wavefronts(stores, part.lines, every) == part.lines // 4).all()


def test_every_element_has_a_thread_and_a_place() -> None:
    axis = Axis((), ())
    row, at, thread, piece = (tirx.Var(name, "int64") for name in ("row", "at", "thread", "piece"))
    load = tirx.BufferLoad(tirx.decl_buffer((1,), "uint8"), [0])
    for extent, width in ((128, 4), (64, 4), (32, 4), (128, 1), (64, 1), (32, 1)):
        part = Gathered(
            "x", Element((), load), row, row, at, axis, axis, extent, 64, 128, True, width, 1, "uint8",
            in_pairs=width == 4,
        )  # fmt: skip
        numbers = {piece: np.arange(part.pieces)[:, None], thread: np.arange(128)}
        position, depth = (evaluate(place, numbers) for place in part.piece(piece, thread))
        corners = {(int(p), int(d)) for p, d in zip(position.ravel(), depth.ravel(), strict=True)}
        assert len(corners) * part.lines * part.width == extent * 64
        places = evaluate(part.offset(row, at), {row: np.arange(extent)[:, None], at: np.arange(64)})
        assert sorted(places.ravel().tolist()) == list(range(extent * 64))


@pytest.mark.parametrize("gpu", ["rtx-3090", "a100", "rtx-2060"])
def test_closed_form_follows_the_lowered_loops(gpu: str) -> None:
    processor = gpu_named(gpu)
    cases = [
        matrices((520, 768), 1032, "int8", added=128),
        matrices((64, 512), 512),
        convolution((4, 64, 28, 28), (128, 64, 1, 1)),
        convolution((2, 64, 14, 14), (64, 64, 3, 3), padding=1),
    ]
    newest = chip_of(processor).architecture != "sm_75"
    target = TARGET if newest else parse_target("cuda:sm_75+avx2")
    for case in cases:
        request = Request(case.function(), frozenset({1}), target, gpu=processor)
        product = read_matrix_product(request.function, tf32=False)
        assert product is not None
        product, _ = packed(product, request.own_constants)
        way, us = fastest_way(product, processor, copies=newest)
        made = schedule(request, Device.GPU)
        assert made is not None
        works = work_of_function(lowered_for_gpu(made.function, cuda_target(target)))
        assert works[0].integer_multiplies > 0 and works[0].tensor_multiplies == 0
        lowered = sum(estimate_fast(work, processor).us for work in works)
        assert us == pytest.approx(lowered + (way.parts > 1) * processor.next_launch_us, rel=0.25, abs=1.0)


def test_turing_has_them_too() -> None:
    request = Request(matrices((64, 64), 64).function(), frozenset(), parse_target("cuda:sm_75+avx2"))
    made = schedule(request, Device.GPU)
    assert made is not None and made.rule == "tensor_core_matmul"
    assert "copy_async" not in str(made.function)


def test_known_weights_are_packed_so_that_words_are_loaded() -> None:
    def packings(name: str) -> dict[int, Packing]:
        return dict(on_tensor_cores(CASES[name]).packings)

    assert packings("matmul_2x3x17x64x24_uint8_0_None")[1].axes == (1, 0)
    assert packings("conv_1x64x6x7x16x64x3x3_int8_1_1_1")[1].axes == (0, 2, 3, 1)  # taps first
    assert packings("conv_1x3x22x22x16x3x7x7_uint8_2_3_1")[1].axes == (1, 2, 3, 0)  # 147 deep
    assert not packings("matmul_40x128x72_uint8_0_4")
