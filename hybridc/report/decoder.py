"""What a plan means for a decoder: where the keys and values lie, and how many tokens a second it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridc.ir import Device, Graph, Plan, Run
from hybridc.options import format_bytes
from hybridc.report.table import plural

_IDS = "input_ids"


@dataclass(frozen=True, slots=True)
class DecoderRow:
    """A decoder whose caches stay in place. Of other networks there is none."""

    caches: Mapping[Device, int]
    """Caches on each device that has some; a layer has two."""
    cache_bytes: Mapping[Device, int]
    positions: int
    """That the caches have room for."""
    sequences: int | None
    """Of a run. None: inputs have other names than those of decoders."""
    tokens: int | None
    """New tokens of each sequence in a run."""
    tokens_per_s: float | None
    """Predicted, of all sequences together."""


def decoder_row(graph: Graph, plan: Plan) -> DecoderRow | None:
    """Of the plan for one number of new tokens."""
    if not graph.caches:
        return None
    ran = {step.kernel: step.device for step in plan.steps if isinstance(step, Run)}
    where = {old: ran[graph.kernels[graph.producer[new]].name] for old, new in graph.caches}
    on = [device for device in Device if device in where.values()]
    ids = graph.tensor[_IDS].shape if _IDS in graph.inputs else ()
    sequences, tokens = ids if len(ids) == 2 else (None, None)
    return DecoderRow(
        caches={device: sum(each is device for each in where.values()) for device in on},
        cache_bytes={
            device: sum(graph.tensor[old].size_bytes for old, each in where.items() if each is device)
            for device in on
        },
        positions=max(graph.tensor[old].shape[-2] for old in where),
        sequences=sequences,
        tokens=tokens,
        tokens_per_s=1e6 * sequences * tokens / plan.makespan_us if sequences and tokens else None,
    )


def decoder_lines(row: DecoderRow) -> list[str]:
    """Sentences of a plan's summary."""
    places = [
        f"{row.caches[device]} on the {device.value.upper()} in {format_bytes(row.cache_bytes[device])}"
        for device in row.caches
    ]
    each_bytes = sum(row.cache_bytes.values()) // row.positions
    lines = [
        f"Caches stay in place, {' and '.join(places)}: room for {plural(row.positions, 'token')}"
        f" of {format_bytes(each_bytes)} each."
    ]
    if row.sequences and row.tokens and row.tokens_per_s:
        of = "" if row.sequences == 1 else f" of each of {row.sequences:,} sequences"
        lines.append(
            f"A run reads {plural(row.tokens, 'new token')}{of}: {row.tokens_per_s:,.1f} tokens a second."
        )
    return lines
