"""Rules predict times for the threads of their request, and leave none of these without a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import op

from hybridc.ir import Device
from hybridc.options import BF16
from hybridc.passes.training.kernels.convolution import Window as GradientWindow
from hybridc.passes.training.kernels.convolution import convolution_weight_gradient
from hybridc.schedules.blocked_operators import ConvWindow, blocked_conv2d, blocked_depthwise
from hybridc.schedules.cpu.conv1d.fourier.fft_conv1d import TRANSFORMS, read_source
from hybridc.schedules.cpu.conv1d.plan import direct_cost
from hybridc.schedules.cpu.conv2d.read import read_convolution
from hybridc.schedules.cpu.conv2d_blocked.depthwise import depthwise_instructions, rank_depthwise_tiles
from hybridc.schedules.cpu.conv2d_blocked.plan import group_count, predicted_cycles, rank_plans
from hybridc.schedules.cpu.conv2d_blocked.read import BlockedConvolution, read_blocked_convolution
from hybridc.schedules.cpu.core.sharing import at_least_one_each, idleness, imbalance, task_slots
from hybridc.schedules.cpu.low_precision.amx_conv2d import predicted_tile_cycles, rank_tile_plans
from hybridc.schedules.cpu.low_precision.bf16_conv2d import read_bf16_convolution
from hybridc.schedules.cpu.wgrad import conv1d_plan
from hybridc.schedules.cpu.wgrad.fourier_plan import read_plans
from hybridc.schedules.cpu.wgrad.read import read_weight_gradient
from hybridc.schedules.cpu.winograd.winograd import candidates, least_cost, predicted_cost
from hybridc.schedules.cpu.winograd.winograd import direct_cost as direct_cost_2d
from hybridc.schedules.rule import PRECISION, Request
from hybridc.schedules.select import schedule
from hybridc.targets import ISAS, Target
from tests.support.fusion import fused_operators

ISA = ISAS["avx512"]
THREADS = (1, 2, 8, 64)
SAME = ConvWindow((1, 1), (1, 1, 1, 1), (1, 1))
POINT = ConvWindow((1, 1), (0, 0, 0, 0), (1, 1))


def request(function: tirx.PrimFunc, threads: int = 2, isa: str = "avx512") -> Request:
    return Request(function, frozenset([1]), Target((), ISAS[isa]), threads=threads)


def blocked(channels: int, side: int, taps: int = 3) -> BlockedConvolution:
    """A convolution of `channels` channels to as many, of a square image."""
    blocks = channels // 16
    window = SAME if taps == 3 else POINT
    function = blocked_conv2d((1, blocks, side, side, 16), (blocks, blocks, taps, taps, 16, 16), window)
    found = read_blocked_convolution(request(function))
    assert found is not None
    return found


def one_line(taps: int = 51, length: int = 6000, outputs: int = 15) -> tirx.PrimFunc:
    return fused_operators(
        lambda emit, x, w: emit(op.nn.conv1d(x, w, padding=taps // 2 * 8, dilation=8)),
        [(1, 15, length), (outputs, 15, taps)],
        ["float32"] * 2,
    )


def one_line_gradient(taps: int = 51, length: int = 60000) -> tirx.PrimFunc:
    shapes = (1, 15, length), (1, 15, length - 8 * (taps - 1))
    data, gradient = (relax.Var("v", relax.TensorType(shape, "float32")) for shape in shapes)
    window = GradientWindow((1,), (0,), (0,), (8,), 1)
    return convolution_weight_gradient(data, gradient, window, [taps])


def parallel_tasks(function: tirx.PrimFunc) -> list[int]:
    """Extents of the parallel loops."""
    found: list[int] = []

    def collect(node: tirx.For) -> None:
        if node.kind == tirx.ForKind.PARALLEL:
            found.append(int(node.extent))

    tvm_ffi.structural_walk(function.body, (tirx.For, collect))
    return found


@pytest.mark.parametrize(
    ("tasks", "threads", "slots"), [(1, 1, 1), (3, 2, 4), (8, 8, 8), (9, 8, 16), (5, 64, 64)]
)
def test_a_kernel_takes_as_long_as_the_thread_with_the_most_tasks(tasks, threads, slots):
    assert task_slots(tasks, threads) == slots
    assert imbalance(tasks, threads) >= slots / tasks * 0.75
    assert idleness(tasks, threads) == max(1.0, threads / tasks)
    assert at_least_one_each(16, threads) == max(16, threads)


def test_a_convolution_has_as_many_tasks_as_there_are_threads():
    conv, found = blocked(256, 14, taps=1), {}
    for threads in THREADS:
        plan = next(iter(rank_plans(conv, ISA, threads).values()))
        found[threads] = plan.parts * group_count(conv, plan) // plan.groups
        assert found[threads] >= threads
    assert len(set(found.values())) > 1


def costs_of_blocked(threads: int) -> list[float]:
    conv = blocked(64, 14)
    return [predicted_cycles(conv, plan, ISA, threads) for plan in rank_plans(conv, ISA, 2).values()]


def costs_of_winograd(threads: int) -> list[float]:
    conv = blocked(64, 14)
    return [predicted_cost(conv, plan, ISA, threads) for plan in candidates(conv, ISA)]


def cheapest_winograd(threads: int) -> list[float]:
    return [least_cost(blocked(64, 14), ISA, threads) or 0.0]


def costs_of_direct(threads: int) -> list[float]:
    return [direct_cost_2d(blocked(16, 14), threads)]


def costs_of_depthwise(threads: int) -> list[float]:
    function = blocked_depthwise((1, 2, 14, 14, 16), (2, 3, 3, 16), SAME)
    conv = read_blocked_convolution(request(function))
    assert conv is not None and conv.depthwise
    return [depthwise_instructions(conv, tile, threads) for tile in rank_depthwise_tiles(conv)]


def costs_of_lines(threads: int) -> list[float]:
    conv = read_convolution(one_line())
    assert conv is not None
    return [direct_cost(conv, ISA, threads)]


def costs_of_transforms(threads: int) -> list[float]:
    source = read_source(request(one_line(), threads))
    assert source is not None
    return [source.plan(t).cost for t in TRANSFORMS if t.points >= 51]


def costs_of_line_gradients(threads: int) -> list[float]:
    wgrad = read_weight_gradient(one_line_gradient())
    assert wgrad is not None
    return [conv1d_plan.direct_cost(wgrad, ISA, threads)]


def costs_of_transformed_gradients(threads: int) -> list[float]:
    return [plan.cost for plan in read_plans(request(one_line_gradient(), threads))]


def costs_of_tiles(threads: int) -> list[float]:
    function = blocked_conv2d((1, 4, 14, 14, 16), (4, 4, 3, 3, 16, 16), SAME).with_attr(PRECISION, BF16)
    conv = read_bf16_convolution(request(function, isa="amx"))
    assert conv is not None
    plans = rank_tile_plans(conv, ISAS["amx"], 2).values()
    return [predicted_tile_cycles(conv, plan, ISAS["amx"], threads) for plan in plans]


COSTS = (
    costs_of_blocked, costs_of_winograd, cheapest_winograd, costs_of_direct, costs_of_depthwise,
    costs_of_lines, costs_of_transforms, costs_of_line_gradients,
    costs_of_transformed_gradients, costs_of_tiles,
)  # fmt: skip


@pytest.mark.parametrize("costs", COSTS)
def test_predicted_time_depends_on_the_threads(costs: Callable[[int], list[float]]) -> None:
    """Of all threads together: idle ones make it more."""
    few, many = costs(1), costs(64)
    assert few and any(one < other for one, other in zip(few, many, strict=True))


FUNCTIONS: dict[str, Callable[[], tirx.PrimFunc]] = {
    "convolution": lambda: blocked_conv2d((1, 16, 14, 14, 16), (16, 16, 1, 1, 16, 16), POINT),
    "winograd": lambda: blocked_conv2d((1, 16, 56, 56, 16), (16, 16, 3, 3, 16, 16), SAME),
    "one line": lambda: one_line(taps=3, length=600000),
    "transformed line": lambda: one_line(length=600000),
    "gradient of a line": lambda: one_line_gradient(taps=3),
    "transformed gradient of a line": lambda: one_line_gradient(length=600000),
    "product": lambda: fused_operators(
        lambda emit, x, w: emit(op.matmul(x, w)), [(128, 768), (768, 768)], ["float32"] * 2
    ),
    "columns": lambda: fused_operators(
        lambda emit, x: emit(op.sum(x, axis=0)), [(512, 1 << 14)], ["float32"]
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_thread_is_without_a_task(name: str) -> None:
    function = FUNCTIONS[name]()
    for threads in THREADS:
        made = schedule(replace(request(function), threads=threads), Device.CPU)
        assert made is not None
        assert max(parallel_tasks(made.function)) >= threads, (made.rule, threads)
