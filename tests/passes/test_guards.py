"""Guards of kernels: against a lazy evaluation of the outputs, which the test makes itself."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Guard, Kernel, Role, Tensor
from hybridc.ir.graph import graph_from_json, graph_to_json
from hybridc.ir.verify import verify
from hybridc.passes.guards import with_guards
from hybridc.passes.planner.emit.reuse_buffers import reuse_buffers
from hybridc.passes.planner.make_plans import assemble
from tests.support.graphs import machine
from tests.support.placements import names, steps_of

GPU, CPU = Device.GPU, Device.CPU


class Builder:
    """A graph of tensors of one size, conditions that are inputs or computed, and choices."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.kernels: list[Kernel] = []

    def tensor(self, role: Role, *, is_condition: bool = False) -> str:
        name = f"{'c' if is_condition else 't'}{len(self.tensors)}"
        shape, dtype = ((), "bool") if is_condition else ((256,), "float32")
        self.tensors.append(Tensor(name, shape, dtype, role))
        return name

    def kernel(self, *inputs: str, is_condition: bool = False, choice: tuple[str, ...] = ()) -> str:
        output = self.tensor(Role.ACTIVATION, is_condition=is_condition)
        read = tuple(dict.fromkeys(choice or inputs))
        name = f"k{len(self.kernels)}"
        self.kernels.append(Kernel(name, name, read, (output,), choice=choice, origins=(name,)))
        return output

    def graph(self, *outputs: str) -> Graph:
        inputs = tuple(t.name for t in self.tensors if t.role is Role.INPUT)
        return Graph(tuple(self.kernels), tuple(self.tensors), inputs, outputs)


def branches() -> Graph:
    """y = x > 0 ? f(g(x)) : h(x), with kernels of the branches in front of the condition."""
    build = Builder()
    x = build.tensor(Role.INPUT)
    taken = build.kernel(build.kernel(x))
    other = build.kernel(x)
    condition = build.kernel(x, is_condition=True)
    return build.graph(build.kernel(choice=(condition, taken, other)))


def drawn(seed: int) -> Graph:
    build, dice = Builder(), random.Random(seed)
    values = [build.tensor(Role.INPUT)]
    conditions = [build.tensor(Role.INPUT, is_condition=True)]
    for _ in range(dice.randrange(4, 30)):
        match dice.randrange(5):
            case 0:
                conditions.append(build.kernel(dice.choice(values), is_condition=True))
            case 1 | 2:
                values.append(build.kernel(*dice.sample(values, min(len(values), 2))))
            case 3:
                taken, other = dice.choice(values), dice.choice(values)
                if taken != other:
                    values.append(build.kernel(choice=(dice.choice(conditions), taken, other)))
            case 4:
                first, second = dice.choice(conditions), dice.choice(conditions)
                if first != second:  # as the conditions of a loop's trips are
                    conditions.append(build.kernel(is_condition=True, choice=(first, second, first)))
    return build.graph(values[-1])


def lazily_needed(graph: Graph, truth: dict[str, bool]) -> set[str]:
    """The kernels that an evaluation on demand runs, where conditions have these values."""
    needed: set[str] = set()

    def need(name: str) -> None:
        position = graph.producer.get(name)
        if position is None or graph.kernels[position].name in needed:
            return
        kernel = graph.kernels[position]
        needed.add(kernel.name)
        if kernel.choice:
            condition, taken, other = kernel.choice
            need(condition)
            need(taken if truth[condition] else other)
        else:
            for each in kernel.inputs:
                need(each)

    for name in graph.outputs:
        need(name)
    return needed


def test_each_branch_has_a_guard_and_stands_behind_its_condition() -> None:
    graph = with_guards(branches())
    guards = {kernel.name: kernel.guards for kernel in graph.kernels}
    assert guards["k0"] == guards["k1"] == (Guard("c4", True),)
    assert guards["k2"] == (Guard("c4", False),)
    assert guards["k3"] == guards["k4"] == ()
    assert [kernel.name for kernel in graph.kernels] == ["k3", "k0", "k1", "k2", "k4"]
    assert graph.kernel["k3"].devices == (CPU,)
    assert graph_from_json(graph_to_json(graph)) == graph


@pytest.mark.parametrize("seed", range(300))
def test_what_an_evaluation_on_demand_needs_is_run(seed: int) -> None:
    graph, dice = drawn(seed), random.Random(seed)
    guarded = with_guards(graph)
    assert sorted(k.name for k in guarded.kernels) == sorted(k.name for k in graph.kernels)
    for _ in range(8):
        truth = {t.name: bool(dice.randrange(2)) for t in graph.tensors if t.dtype == "bool"}
        needed = lazily_needed(graph, truth)
        computed, run = set(graph.inputs), set()
        for kernel in guarded.kernels:  # in the order of a run, looking at guards one after the other
            for guard in kernel.guards:
                assert guard.tensor in computed
                if truth[guard.tensor] != guard.value:
                    break
            else:
                run.add(kernel.name)
                computed.update(kernel.outputs)
        assert needed <= run


@pytest.mark.parametrize("seed", range(150))
def test_plans_of_guarded_kernels_are_accepted(seed: int) -> None:
    graph, dice = with_guards(drawn(seed)), random.Random(seed)
    placement = [dice.choice(kernel.devices) for kernel in graph.kernels]
    steps = steps_of(graph, placement)
    verify(graph, assemble(graph, machine(), None, *reuse_buffers(graph, steps, (GPU, CPU))))


def test_steps_on_the_gpu_wait_for_their_condition() -> None:
    graph = with_guards(branches())
    steps = steps_of(graph, [CPU, GPU, GPU, GPU, CPU])
    position = {name: i for i, name in enumerate(names(steps))}
    assert position["k3@cpu"] in steps[position["k0@gpu"]].waits


PLANNED = with_guards(branches())
PLAN = assemble(PLANNED, machine(), None, *reuse_buffers(PLANNED, steps_of(PLANNED, [CPU] * 5), (CPU,)))


def changed(kernel: str, **changes: Any) -> Graph:
    kernels = tuple(replace(k, **changes) if k.name == kernel else k for k in PLANNED.kernels)
    return replace(PLANNED, kernels=kernels)


@pytest.mark.parametrize(
    ("graph", "code", "what"),
    [
        (changed("k4", choice=()), "HC224", "computed only if 'c4' is True"),
        (changed("k4", choice=("c4", "t3", "t2")), "HC224", "computed only if 'c4' is"),
        (changed("k4", choice=("c4", "t2")), "HC210", "choice"),
        (changed("k4", choice=("t2", "c4", "t3")), "HC224", "not one bool"),
        (changed("k4", outputs=()), "HC210", "choice"),
        (changed("k1", guards=()), "HC224", "reads 't1'"),
        (changed("k1", guards=(Guard("c4", False),)), "HC224", "reads 't1'"),
        (changed("k0", guards=(Guard("t0", True),)), "HC224", "not one bool"),
        (changed("k3", guards=(Guard("c4", True),)), "HC224", "reads 'c4'"),
        (changed("k4", guards=(Guard("c4", True),)), "HC224", "results"),
        (changed("k2", guards=(Guard("missing", True),)), "HC210", "unknown tensor"),
    ],
)
def test_what_may_be_read_before_it_is_computed_is_refused(graph: Graph, code: str, what: str) -> None:
    verify(PLANNED, PLAN)
    with pytest.raises(PlanError, match=what) as refused:
        verify(graph, PLAN)
    assert refused.value.code == code


def test_a_condition_that_is_gone_when_a_step_looks_at_it_is_refused() -> None:
    [condition] = [b for b in PLAN.buffers if b.tensor == "c4"]
    early = replace(condition, last_step=condition.first_step)
    buffers = tuple(early if b is condition else b for b in PLAN.buffers)
    with pytest.raises(PlanError) as refused:
        verify(PLANNED, replace(PLAN, buffers=buffers))
    assert refused.value.code == "HC214"


def test_a_condition_that_only_the_gpu_knows_is_refused() -> None:
    graph = replace(PLANNED, kernels=tuple(replace(k, devices=(GPU, CPU)) for k in PLANNED.kernels))
    steps = steps_of(graph, [GPU, CPU, CPU, CPU, CPU])
    plan = assemble(graph, machine(), None, *reuse_buffers(graph, steps, (GPU, CPU)))
    with pytest.raises(PlanError, match="not computed on the CPU") as refused:
        verify(graph, plan)
    assert refused.value.code == "HC224"
