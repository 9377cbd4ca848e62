"""Products in tiles: drawn shapes in drawn tiles compute what numpy says, whatever order threads run in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from tvm import ir, te, tirx

from hybridc import emulator
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cuda.conv2d.conv2d import conv2d
from hybridc.schedules.cuda.core.anchor import find_anchor
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function
from hybridc.schedules.cuda.tile.choose import TILES
from hybridc.schedules.cuda.tile.group import STEPS, slices_of
from hybridc.schedules.cuda.tile.kernel import scheduled_product
from hybridc.schedules.cuda.tile.packing import with_depth_first
from hybridc.schedules.cuda.tile.plan import Plan, plan_of
from hybridc.schedules.cuda.tile.read import read_product
from hybridc.schedules.cuda.tile.shape import Tile
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.shapes import index_shape
from hybridc.schedules.storage import stored
from hybridc.targets import parse_target
from tests.schedules.cuda.families import FAMILIES, Array, Family, convolution
from tests.schedules.cuda.tensor_cores import names_to_run
from tests.schedules.cuda.test_rules import run
from tests.support.emulated import compile_for_emulator

TARGET = parse_target("cuda:sm_80+avx2")
DRAWN = 36
RELATIVE_ERROR = 1e-5


@dataclass(frozen=True)
class Case:
    family: Family
    tile: Tile
    steps: int = STEPS[0]
    """Of a slice, where their number is free."""
    packed: bool = False
    """Whether the second input is a weight."""

    def plan(self, function: tirx.PrimFunc) -> Plan:
        anchor = find_anchor(function)
        assert anchor is not None
        product = read_product(function, anchor.name)
        assert product is not None
        if self.packed:
            weight = [str(p.name) for p in function.params].index("p1")
            product = with_depth_first(product, function.params, {weight})
        slices = slices_of(product.depth, self.steps)
        # blocks of at most 256 threads, whose tile fits into shared memory beside the slices
        most = max(1, min(256 // self.tile.threads, 8192 // (self.tile.rows * self.tile.columns)))
        tile = replace(
            self.tile, parts=min(self.tile.parts, slices.count), groups=min(self.tile.groups, most)
        )
        return plan_of(product, tile, slices)


@dataclass(frozen=True)
class MatrixProduct(Family):
    """A product as tensor expressions: Relax by itself does not fuse transpositions of operands."""

    def function(self, name: str) -> tirx.PrimFunc:
        inputs = [te.placeholder(index_shape(s), "float32", f"p{i}") for i, s in enumerate(self.shapes)]
        return te.create_prim_func([*inputs, self.build(*inputs)]).with_attr("global_symbol", name)


def matrix_product(generator: random.Random) -> Family:
    """Batched or not, operands and result transposed or not, with bias and residual or without."""
    batch = generator.choice(((), (), (3,), (2, 2)))
    m, n, k = (generator.choice((5, 16, 31, 40, 64, 72, 100)) for _ in range(3))
    left, right, out = (generator.random() < 0.4 for _ in range(3))
    biased = generator.random() < 0.5

    def shape(rows: int, columns: int, transposed: bool) -> tuple[int, ...]:
        return (*batch, columns, rows) if transposed else (*batch, rows, columns)

    def at(x: te.Tensor, place: Sequence[ir.Expr], i: ir.Expr, j: ir.Expr, transposed: bool) -> ir.Expr:
        return x[(*place, j, i)] if transposed else x[(*place, i, j)]

    def build(x: te.Tensor, y: te.Tensor, b: te.Tensor, r: te.Tensor) -> te.Tensor:
        depth = te.reduce_axis((integer(0), integer(k)), "k")

        def product(*at_: ir.Expr) -> ir.Expr:
            *place, i, j = at_
            return te.sum(at(x, place, i, depth, left) * at(y, place, depth, j, right), depth)

        z = te.compute(index_shape((*batch, m, n)), product, "product")
        one = tirx.FloatImm("float32", 1.0)
        e = te.compute(
            z.shape, lambda *i: tirx.exp(tirx.min(z(*i) + b[i[-1]], one)) if biased else z(*i), "e"
        )
        t = te.compute(r.shape, lambda *i: e(*i[:-2], i[-1], i[-2]) if out else e(*i), "t")
        return te.compute(r.shape, lambda *i: t(*i) + r(*i), "added")

    def reference(x: Array, y: Array, b: Array, r: Array) -> Array:
        z = (x.swapaxes(-1, -2) if left else x) @ (y.swapaxes(-1, -2) if right else y)
        z = np.exp(np.minimum(z + b, 1)) if biased else z
        return (z.swapaxes(-1, -2) if out else z) + r

    shapes = (shape(m, k, left), shape(k, n, right), (n,), shape(m, n, out))
    return MatrixProduct(build, reference, shapes, "matmul")


@dataclass(frozen=True)
class NarrowWeights(Family):
    """A function whose second input is stored in 16 bits, all else in 32: the first layer of a network."""

    def function(self, name: str) -> tirx.PrimFunc:
        wide = replace(self, dtypes=()).function_in_float32()
        position = [str(p.name) for p in wide.params].index("p1")
        return stored(wide, {position: "float16"}).with_attr("global_symbol", name)

    def function_in_float32(self) -> tirx.PrimFunc:
        return Family.function(self, "wide")


def narrow(family: Family) -> Family:
    dtypes = ["float32"] * len(family.shapes)
    dtypes[1] = "float16"
    return NarrowWeights(family.build, family.reference, family.shapes, family.rule, tuple(dtypes))


def drawn_convolution(generator: random.Random) -> Family:
    """Of one to three axes; any stride, padding and dilation."""
    rank = generator.choice((1, 2, 2, 2, 3))
    taps = generator.choice((1, 1, 2, 3, 3, 5, 7) if rank < 3 else (1, 3))
    dilation = generator.choice((1, 1, 2))
    least = (taps - 1) * dilation + 1
    stride = generator.choice((1, 1, 2, 3))
    # some outputs along each axis, many where there is but one
    size = least + stride * generator.choice((3, 4, 6) if rank < 3 else (2,)) * (12 if rank == 1 else 1)
    settings = {"stride": stride, "padding": generator.randrange(least), "dilation": dilation}
    channels, filters = generator.choice((1, 3, 8, 16, 21)), generator.choice((4, 7, 24, 64))
    groups = generator.choice((1, 1, 1, 2, 3))
    settings["groups"] = groups
    data = (generator.choice((1, 1, 2)), groups * channels, *(size,) * rank)
    weight = (groups * filters, channels, *(taps,) * rank)
    return convolution(data, weight, residual=generator.random() < 0.5, **settings)


def drawn_cases() -> dict[str, Case]:
    generator = random.Random(0)
    cases = {}
    for number in range(DRAWN):
        draw = matrix_product if number % 2 else drawn_convolution
        tile = replace(
            generator.choice(TILES),
            groups=generator.choice((1, 1, 2, 4)),
            parts=generator.choice((1, 1, 2, 3)),
        )
        family = draw(generator)
        if np.prod(family.shapes[1][1:]) > 1:  # a convolution of one step reduces nothing
            steps, packed = generator.choice(STEPS), generator.random() < 0.5
            cases[f"case_{number}"] = Case(family, tile, steps, packed)
    stem = convolution((1, 3, 22, 22), (16, 3, 7, 7), padding=3, stride=2)
    # 19 taps are not slices of eight, though the 8 x 19 weights of an output are
    cases["long_window"] = Case(convolution((1, 8, 60), (8, 8, 19), padding=9), TILES[-4])
    cases["narrow_stem"] = Case(narrow(stem), TILES[-1])
    cases["narrow_product"] = Case(narrow(FAMILIES["matmul_gelu"]), TILES[3])
    return cases


CASES = drawn_cases()


@pytest.fixture(scope="module")
def scheduled(request: pytest.FixtureRequest) -> dict[str, Scheduled]:
    """Of the cases that are to run, or of all where none is named."""
    chosen, made = names_to_run(request, test_drawn_product_is_what_numpy_says), {}
    for name in [each for each in CASES if each in chosen or not chosen]:
        case = CASES[name]
        function = case.family.function(name)
        plan = case.plan(function)
        result = finish_function(scheduled_product(function, plan), "tiled", cuda_target(TARGET))
        assert result is not None, name
        packings = tuple((weight.position, weight.packing) for weight in plan.product.weights)
        made[name] = replace(result, packings=packings)
    return made


@pytest.fixture(scope="module")
def library(scheduled: dict[str, Scheduled]) -> tvm.runtime.Module:
    """All cases, on an emulated GPU whose threads run in any order."""
    emulator.start(64 << 20, thread_order=emulator.ThreadOrder.SHUFFLED)
    with cuda_compiler(compile_for_emulator):
        module = tvm.IRModule({name: s.function for name, s in scheduled.items()})
        return tvm.compile(module, target=tvm.target.Target(cuda_target(TARGET), host="llvm"))


@pytest.mark.parametrize("name", CASES)
def test_drawn_product_is_what_numpy_says(
    name: str, scheduled: dict[str, Scheduled], library: tvm.runtime.Module
) -> None:
    case = CASES[name]
    function = case.family.function(name)
    inputs, [got], launches = run(library, name, case.family, function, scheduled[name])
    want = case.family.reference(*(x.astype(np.float64) for x in inputs))
    scale = max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(got, np.reshape(want, got.shape), rtol=0, atol=RELATIVE_ERROR * scale)
    assert launches == (2 if case.plan(function).tile.parts > 1 else 1)


def test_weights_are_packed_where_no_other_function_reads_them() -> None:
    function = convolution((1, 16, 8, 8), (24, 16, 3, 3), padding=1).function("kernel")
    weight = [str(p.name) for p in function.params].index("p1")
    request = Request(function, frozenset({weight}), TARGET)
    own, shared = conv2d(request), conv2d(replace(request, shared_constants=request.constants))
    assert own is not None and shared is not None
    [(position, packing)] = own.packings
    weights = np.arange(24 * 16 * 9, dtype=np.float32).reshape(24, 16, 3, 3)
    assert position == weight and np.array_equal(packing.apply(weights), weights.transpose(1, 2, 3, 0))
    assert shared.packings == ()


def test_groups_of_channels_are_a_batch_of_products() -> None:
    function = convolution((1, 24, 9, 9), (36, 8, 3, 3), padding=1, groups=3).function("kernel")
    anchor = find_anchor(function)
    product = None if anchor is None else read_product(function, anchor.name)
    assert product is not None
    assert (product.batch.size, product.rows.size, product.depth.size) == (3, 12, 72)
