"""What a decoder's context costs: bytes of weights and caches by device, and predicted tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridc.ir import BufferKind, Device, Graph, Plan, Role
from hybridc.machine import Machine
from hybridc.options import format_bytes
from hybridc.passes.planner.other_ways import LAYER_SPLIT
from hybridc.report.decoder import DecoderRow, decoder_row
from hybridc.report.table import Column, format_us, render_table


@dataclass(frozen=True, slots=True)
class ContextRow:
    """A context and a budget, and the plan for them."""

    context: int
    gpu_memory_bytes: int | None
    """The budget; None on a CPU alone."""
    gpu_weight_bytes: int
    """Of weights that stay on the GPU."""
    host_weight_bytes: int
    """Of the others, which the CPU reads or which are copied in each run."""
    decoder: DecoderRow
    """Where the caches lie; predicted tokens a second."""
    predicted_us: float


def context_row(
    context: int, graph: Graph, plan: Plan, machine: Machine, whole: Graph | None = None
) -> ContextRow | None:
    """None of a network without caches. `whole` is the network with no kernel cut up."""
    decoder = decoder_row(graph, plan, machine, whole)
    resident = {
        buffer.tensor
        for buffer in plan.buffers
        if buffer.device is Device.GPU and buffer.kind is BufferKind.WEIGHT and buffer.first_step < 0
    }
    sizes = {t.name: t.size_bytes for t in graph.tensors if t.role is Role.WEIGHT}
    on_gpu = sum(size for name, size in sizes.items() if name in resident)
    if decoder is None:
        return None
    budget = plan.budget_bytes
    return ContextRow(context, budget, on_gpu, sum(sizes.values()) - on_gpu, decoder, plan.makespan_us)


def contexts_to_json(rows: Sequence[ContextRow]) -> dict[str, Any]:
    """As plain JSON values, in the rows' order."""
    return {"contexts": [asdict(row) for row in rows]}


def render_contexts(rows: Sequence[ContextRow], title: str) -> str:
    """A table, ending in a newline."""
    headings = ("context", "budget", "weights GPU", "host", "caches GPU", "host", "run", "tokens/s", "split")
    columns = [Column(heading, numeric=True) for heading in headings]
    notes = [
        "Weights and caches in bytes by device. All times are predicted; split: tokens a second of a split in"
        " whole layers, at its best, by the same simulator."
    ]
    table = render_table(columns, [_cells(row) for row in rows])
    return "\n".join([title, "", *(f"  {line}" for line in table), "", *notes]) + "\n"


def _cells(row: ContextRow) -> tuple[str, ...]:
    caches = row.decoder.cache_bytes
    split = next((other for other in row.decoder.others if other.name == LAYER_SPLIT), None)
    return (
        f"{row.context:,}",
        "-" if row.gpu_memory_bytes is None else format_bytes(row.gpu_memory_bytes),
        format_bytes(row.gpu_weight_bytes),
        format_bytes(row.host_weight_bytes),
        format_bytes(caches.get(Device.GPU, 0)),
        format_bytes(caches.get(Device.CPU, 0)),
        format_us(row.predicted_us),
        _per_s(row.decoder.tokens_per_s),
        _per_s(None if split is None else split.tokens_per_s),
    )


def _per_s(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}"
