"""The verifier's work grows with the plan and no faster: counted in instructions, not in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from hybridc.ir import (
    Arena,
    Buffer,
    BufferKind,
    Copy,
    Device,
    Graph,
    Kernel,
    Plan,
    Role,
    Run,
    Step,
    Tensor,
)
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.ir.verify import verify
from hybridc.passes.planner.emit.timeline import timeline

CPU, GPU = Device.CPU, Device.GPU
Case = tuple[Graph, Plan]


def tensor(name: str, role: Role = Role.ACTIVATION) -> Tensor:
    return Tensor(name, (8, 8), "float32", role)


def buffer(of: Tensor, device: Device, slot: int, first_step: int, last_step: int) -> Buffer:
    kind = BufferKind.WEIGHT if of.role is Role.WEIGHT else BufferKind.TENSOR
    offset_bytes = slot * ALIGNMENT_BYTES
    return Buffer(of.name, kind, device, offset_bytes, of.size_bytes, first_step, last_step)


def plan_of(steps: list[Step], buffers: list[Buffer]) -> Plan:
    sizes = {d: max((b.end_bytes for b in buffers if b.device is d), default=0) for d in (GPU, CPU)}
    arenas = tuple(Arena(device, size, size) for device, size in sizes.items())
    times_us = (1.0,) * len(steps)
    return Plan(tuple(steps), tuple(buffers), arenas, None, times_us, timeline(steps, times_us)[0])


def copies_of_one(role: Role) -> Callable[[int], Case]:
    """A tensor comes to the GPU again and again, each time for one kernel."""

    def case(count: int) -> Case:
        x, y = tensor("x", role), [tensor(f"y{i}", Role.OUTPUT) for i in range(count)]
        kernels = tuple(Kernel(f"k{i}", "f", ("x",), (y[i].name,)) for i in range(count))
        inputs = () if role is Role.WEIGHT else ("x",)
        steps: list[Step] = []
        buffers = [] if role is Role.WEIGHT else [buffer(x, CPU, count, -1, 3 * count)]
        for i in range(count):
            first = len(steps)
            steps += [Copy("x", CPU, GPU, (first - 2,) if i else ()), Run(f"k{i}", GPU, (first,))]
            steps.append(Copy(y[i].name, GPU, CPU, (first + 1,)))
            buffers += [buffer(x, GPU, 0, first, first + 1), buffer(y[i], GPU, i + 1, first + 1, first + 2)]
            buffers.append(buffer(y[i], CPU, i, first + 2, 3 * count))
        return Graph(kernels, (x, *y), inputs, tuple(t.name for t in y)), plan_of(steps, buffers)

    return case


def chain(count: int) -> Case:
    """Kernels one behind the other, in two places by turns."""
    tensors = [tensor("x0", Role.INPUT), *(tensor(f"x{i}") for i in range(1, count))]
    tensors.append(tensor(f"x{count}", Role.OUTPUT))
    kernels = tuple(Kernel(f"k{i}", "f", (f"x{i}",), (f"x{i + 1}",)) for i in range(count))
    steps: list[Step] = [Run(f"k{i}", CPU) for i in range(count)]
    buffers = [buffer(t, CPU, i % 2, i - 1, i) for i, t in enumerate(tensors)]
    return Graph(kernels, tuple(tensors), ("x0",), (f"x{count}",)), plan_of(steps, buffers)


def one_kernel(count: int) -> Case:
    """One kernel that writes many outputs over its inputs."""
    old = [tensor(f"x{i}", Role.INPUT) for i in range(count)]
    new = [tensor(f"y{i}", Role.OUTPUT) for i in range(count)]
    names = tuple(t.name for t in old), tuple(t.name for t in new)
    pairs = tuple(zip(reversed(names[1]), reversed(names[0]), strict=True))
    kernel = Kernel("k", "f", *names, may_overwrite=pairs)
    buffers = [buffer(t, CPU, i, -1, 0) for i, t in enumerate(old)]
    buffers += [buffer(t, CPU, i, 0, 1) for i, t in enumerate(new)]
    return Graph((kernel,), (*old, *new), *names), plan_of([Run("k", CPU)], buffers)


def instructions(function: Callable[[], Any]) -> int:
    """Of Python, run by a call."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "case",
    [copies_of_one(Role.INPUT), copies_of_one(Role.WEIGHT), chain, one_kernel],
    ids=["copies", "copies of a weight", "chain", "one kernel"],
)
def test_work_is_linear_in_the_plan(case: Callable[[int], Case]) -> None:
    small, middle, large = (instructions(partial(verify, *case(count))) for count in (40, 80, 160))
    assert large - middle < 2.2 * (middle - small)
