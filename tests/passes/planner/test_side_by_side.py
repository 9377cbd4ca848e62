"""Which products are cut, what of a graph is meant for the CPU, and plans that begin there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.ir import Device, Graph, Kernel, Role, Run, Tensor
from hybridc.ir.verify import verify
from hybridc.machine import Machine, load_machine
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.make_plans import make_plans
from hybridc.passes.planner.side_by_side import (
    cut_by_bandwidth,
    cut_worth_making,
    second_kernels,
    with_heads,
)
from tests.support.machines import SLOW_MEMORIES

WEIGHT, ROWS, LAYERS = 30_000, 64, 4
DEVICES = (Device.GPU, Device.CPU)


@pytest.fixture
def machine() -> Machine:
    return load_machine(SLOW_MEMORIES)


def kernel(name: str, *inputs: str, moved: int = 0) -> Kernel:
    return Kernel(name, name, inputs, (f"{name}.out",), bytes_moved=moved, devices=DEVICES, family="matmul")


def graph_of(kernels: list[Kernel], weights: dict[str, int]) -> Graph:
    made = [output for each in kernels for output in each.outputs]
    roles = {name: Role.ACTIVATION for name in made} | {made[-1]: Role.OUTPUT}
    return Graph(
        tensors=(
            Tensor("x", (ROWS,), "uint8", Role.INPUT),
            *(Tensor(name, (size,), "uint8", Role.WEIGHT) for name, size in weights.items()),
            *(Tensor(name, (ROWS,), "uint8", role) for name, role in roles.items()),
        ),
        kernels=tuple(kernels),
        inputs=("x",),
        outputs=(made[-1],),
    )


def whole() -> Graph:
    kernels, last = [], "x"
    for n in range(LAYERS):
        kernels.append(kernel(f"product{n}", last, f"w{n}", moved=WEIGHT))
        last = kernels[-1].outputs[0]
    return graph_of(kernels, {f"w{n}": WEIGHT for n in range(LAYERS)})


def in_two() -> Graph:
    """Two thirds of each product for the GPU, with what joins parts once for each device."""
    kernels: list[Kernel] = []
    weights: dict[str, int] = {}
    rows = ["x", "x"]
    for n in range(LAYERS):
        sizes = (2 * WEIGHT // 3, WEIGHT // 3)
        names = [f"product{n}.{part}" for part in range(2)]
        for part, size in enumerate(sizes):
            weights[f"w{n}.{part}"] = size
            kernels.append(kernel(names[part], rows[part], f"w{n}.{part}", moved=size))
        parts = [each.outputs[0] for each in kernels[-2:]]
        joins = [kernel(f"join{n}.{copy}", *parts) for copy in range(1 if n == LAYERS - 1 else 2)]
        kernels += joins
        rows = [each.outputs[0] for each in joins]
    return graph_of(kernels, weights)


def second_weights() -> frozenset[str]:
    return frozenset(f"w{n}.1" for n in range(LAYERS))


def products() -> dict[str, int]:
    return {f"w{n}": WEIGHT for n in range(LAYERS)}


def test_parts_take_equally_long(machine: Machine) -> None:
    cut = cut_worth_making(products(), whole(), machine)
    assert cut is not None and cut.weights == {f"w{n}" for n in range(LAYERS)}
    assert cut.share == pytest.approx(1 / 3)
    same = cut_by_bandwidth(products(), machine)
    assert same is not None and same.share == pytest.approx(1 / 3) and same.weights == cut.weights


def test_products_are_left_whole_where_an_exchange_takes_longer(machine: Machine) -> None:
    slow = replace(machine, link=replace(machine.link, latency_us=WEIGHT / 0.02 / 1e3))
    assert cut_worth_making(products(), whole(), slow) is None
    assert cut_by_bandwidth(products(), slow) is None


def with_caches(heads: int = 4, cache_bytes: int = 6000) -> Graph:
    """Products, and behind each rows that take their places in a cache, which attention reads."""
    graph = whole()
    kernels, tensors, pairs = list(graph.kernels), list(graph.tensors), []
    for n in range(LAYERS):
        old, new = f"past{n}", f"present{n}"
        shape = (1, heads, cache_bytes // heads)
        tensors += [Tensor(old, shape, "uint8", Role.INPUT), Tensor(new, shape, "uint8", Role.OUTPUT)]
        append = Kernel(f"append{n}", "append", (old, f"product{n}.out"), (new,), ((new, old),))
        kernels.append(replace(append, devices=DEVICES, appends=True, bytes_moved=ROWS))
        tensors.append(Tensor(f"attention{n}.out", (ROWS,), "uint8", Role.OUTPUT))
        kernels.append(kernel(f"attention{n}", new, moved=cache_bytes))
        pairs.append((old, new))
    return replace(
        graph,
        kernels=tuple(kernels),
        tensors=tuple(tensors),
        inputs=(*graph.inputs, *(old for old, _ in pairs)),
        outputs=(*graph.outputs, *(new for _, new in pairs), *(f"attention{n}.out" for n in range(LAYERS))),
        loop_carried=tuple(pairs),
    )


def test_heads_are_divided_like_columns_where_first_parts_fit(machine: Machine) -> None:
    cut = cut_by_bandwidth(products(), machine)
    assert cut is not None and with_heads(cut, products(), whole(), 1 << 30) == cut  # no caches
    found = with_heads(cut, products(), with_caches(heads=3), 1 << 30)
    assert found.heads == pytest.approx(1 / 3) and found.share == cut.share
    found = with_heads(cut, products(), with_caches(heads=4), 1 << 30)
    assert found.heads == 0.25 and found.share == cut.share


def test_second_parts_grow_with_what_does_not_fit(machine: Machine) -> None:
    """First parts have room then, beside what else a GPU holds."""
    cut = cut_by_bandwidth(products(), machine)
    assert cut is not None
    graph, all_bytes = with_caches(), LAYERS * (WEIGHT + 6000)
    shares = []
    for budget_bytes in (2 * all_bytes, all_bytes // 2, all_bytes // 4, 0):
        found = with_heads(cut, products(), graph, budget_bytes)
        first_bytes = LAYERS * ((1 - found.share) * WEIGHT + (1 - found.heads) * 6000)
        others = 16 * ROWS
        if 0 < budget_bytes < all_bytes:
            assert budget_bytes - others <= first_bytes <= budget_bytes
        shares.append(found.share)
    assert shares == sorted(shares) and shares[-1] > shares[0] and shares[-1] <= 0.95


def test_what_only_second_parts_read_is_meant_for_the_cpu() -> None:
    found = second_kernels(in_two(), second_weights())
    assert found == {f"product{n}.1" for n in range(LAYERS)} | {f"join{n}.1" for n in range(LAYERS - 1)}


@pytest.mark.parametrize("share", [0.5, 0.75, 1.2])
def test_both_devices_work_at_once(machine: Machine, share: float) -> None:
    """In two thirds of the time that the GPU takes alone where all fits; and never slower than whole."""
    budget_bytes = int(share * LAYERS * WEIGHT)
    graph = in_two()
    side = Tiling(graph, second=second_kernels(graph, second_weights()))
    [(_, alone)] = make_plans((Tiling(whole()),), machine, (budget_bytes,), DEVICES)
    [(chosen, plan)] = make_plans((Tiling(whole()), side), machine, (budget_bytes,), DEVICES)
    verify(chosen.graph, plan)
    assert plan.makespan_us <= alone.makespan_us
    assert plan.arena_bytes(Device.GPU) <= budget_bytes
    assert plan.time_bound_us <= plan.makespan_us
    if share >= 0.75:
        assert chosen is side and plan.makespan_us < 0.72 * LAYERS * WEIGHT / 0.02 / 1e3
        second = [step for step in plan.steps if isinstance(step, Run) and step.device is Device.CPU]
        products = {name for name in side.second if name.startswith("product")}
        assert products <= {step.kernel for step in second}


def test_a_required_way_is_taken_wherever_it_fits(machine: Machine) -> None:
    graph = in_two()
    slower = replace(machine, link=replace(machine.link, latency_us=1e4))
    second = second_kernels(graph, second_weights())
    required = Tiling(graph, second=second, is_required=True)
    budgets = (LAYERS * WEIGHT // 2, 2 * LAYERS * WEIGHT)
    found = make_plans((Tiling(whole()), required), slower, budgets, DEVICES)
    assert all(tiling is required for tiling, _ in found)
    either = make_plans((Tiling(whole()), replace(required, is_required=False)), slower, budgets, DEVICES)
    assert all(a.makespan_us <= b.makespan_us for (_, a), (_, b) in zip(either, found, strict=True))
