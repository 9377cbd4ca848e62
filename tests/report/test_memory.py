"""Bytes by class: by hand, and against the arena of real plans."""

from __future__ import annotations

from hybridc.ir import Buffer, BufferKind, Device, Plan, Run
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from hybridc.report.memory import ByteClass, ByteRow, byte_rows
from tests.support.graphs import chain, machine

GPU, CPU = Device.GPU, Device.CPU


def plan(*buffers: Buffer) -> Plan:
    return Plan((Run("k0", GPU), Run("k1", GPU), Run("k2", CPU)), buffers, (), None, (1.0,) * 3, 3.0)


def test_classes_are_told_apart_and_counted_at_the_peak() -> None:
    rows = byte_rows(
        plan(
            Buffer("r", BufferKind.WEIGHT, GPU, 0, 512, -1, 3),
            Buffer("s", BufferKind.WEIGHT, GPU, 512, 1024, 0, 0),
            Buffer("x", BufferKind.TENSOR, GPU, 1536, 512, 0, 1),
            Buffer("k1", BufferKind.WORKSPACE, GPU, 2048, 4096, 1, 1),
            Buffer("x", BufferKind.TENSOR, CPU, 0, 99999, -1, 3),
        )
    )
    assert rows == (
        ByteRow(ByteClass.RESIDENT, 1, 512, 512),
        ByteRow(ByteClass.STREAMED, 1, 1024, 0),
        ByteRow(ByteClass.ACTIVATIONS, 1, 512, 512),
        ByteRow(ByteClass.WORKSPACE, 1, 4096, 4096),
    )


def test_bytes_taken_over_in_place_count_once() -> None:
    taken = Buffer("y", BufferKind.TENSOR, GPU, 0, 512, 1, 2)
    (row,) = byte_rows(plan(Buffer("x", BufferKind.TENSOR, GPU, 0, 1024, 0, 1), taken))
    assert (row.most_bytes, row.buffers) == (1024, 2)


def test_nothing_on_the_gpu_has_no_classes() -> None:
    assert byte_rows(plan(Buffer("x", BufferKind.TENSOR, CPU, 0, 512, 0, 1))) == ()


def test_classes_add_up_to_the_bound_of_the_arena() -> None:
    graph = chain(12, size=400, weight=300)
    peak_bytes = all_gpu_peak_bytes(graph, machine())
    for percent in (30, 50, 100):
        made = make_plan(graph, machine(), peak_bytes * percent // 100, (GPU, CPU), effort=Effort(0.02))
        bound_bytes = next(a.lower_bound_bytes for a in made.arenas if a.device is GPU)
        assert sum(row.peak_bytes for row in byte_rows(made)) == bound_bytes
