"""What a plan means for a decoder: where the keys and values lie, and how many tokens a second it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridc.ir import Device, Graph, Plan, Run
from hybridc.machine import Machine
from hybridc.options import format_bytes
from hybridc.passes.planner.other_ways import OtherWay, other_ways
from hybridc.report.table import format_us, plural

_IDS = "input_ids"


@dataclass(frozen=True, slots=True)
class DecoderRow:
    """A decoder whose caches stay in place. Of other networks there is none."""

    caches: Mapping[Device, int]
    """Caches, or parts of caches, on each device that has some; a layer has two caches."""
    cache_bytes: Mapping[Device, int]
    cache_dtypes: tuple[str, ...]
    """Types of their elements, each once."""
    positions: int
    """That the caches have room for."""
    sequences: int | None
    """Of a run. None: inputs have other names than those of decoders."""
    tokens: int | None
    """New tokens of each sequence in a run."""
    tokens_per_s: float | None
    """Predicted, of all sequences together."""
    others: tuple[OtherRow, ...] = ()
    """What others' ways would reach within the budget."""
    is_cut: bool = False
    """Whether the heads of caches are divided between the devices, so that each cache is two parts."""


@dataclass(frozen=True, slots=True)
class OtherRow:
    """Another way to run the decoder, by the same simulator."""

    name: str
    makespan_us: float | None
    """None: it does not fit the budget."""
    tokens_per_s: float | None
    """Predicted, of all sequences together."""
    gpu_layers: int | None
    """Of a layer split, layers on the GPU, of `layers`."""
    layers: int | None

    @staticmethod
    def of(way: OtherWay, new_tokens: int | None) -> OtherRow:
        per_s = 1e6 * new_tokens / way.makespan_us if new_tokens and way.makespan_us else None
        return OtherRow(way.name, way.makespan_us, per_s, way.gpu_layers, way.layers)

    def __str__(self) -> str:
        if self.makespan_us is None:
            return f"{self.name} does not fit"
        split = "" if self.layers is None else f" ({self.gpu_layers} of {self.layers} layers on the GPU)"
        told = format_us(self.makespan_us) if self.tokens_per_s is None else f"{self.tokens_per_s:,.1f}"
        return f"{self.name}{split} {told}"


def decoder_row(
    graph: Graph, plan: Plan, machine: Machine | None = None, whole: Graph | None = None
) -> DecoderRow | None:
    """Of the plan for one number of new tokens; with the machine and a budget, beside others' ways, which
    run the network `whole`, if that is another graph."""
    if not graph.caches:
        return None
    ran = {step.kernel: step.device for step in plan.steps if isinstance(step, Run)}
    where = {old: ran[graph.kernels[graph.producer[new]].name] for old, new in graph.caches}
    on = [device for device in Device if device in where.values()]
    ids = graph.tensor[_IDS].shape if _IDS in graph.inputs else ()
    sequences, tokens = ids if len(ids) == 2 else (None, None)
    new_tokens = sequences * tokens if sequences and tokens else None
    others: tuple[OtherWay, ...] = ()
    if machine is not None and plan.budget_bytes is not None:
        others = other_ways(whole or graph, machine, plan.budget_bytes)
    return DecoderRow(
        caches={device: sum(each is device for each in where.values()) for device in on},
        cache_bytes={
            device: sum(graph.tensor[old].size_bytes for old, each in where.items() if each is device)
            for device in on
        },
        cache_dtypes=tuple(dict.fromkeys(graph.tensor[old].dtype for old in where)),
        positions=max(graph.tensor[old].shape[-2] for old in where),
        sequences=sequences,
        tokens=tokens,
        tokens_per_s=1e6 * new_tokens / plan.makespan_us if new_tokens else None,
        others=tuple(OtherRow.of(way, new_tokens) for way in others),
        is_cut=bool(graph.parts),
    )


def decoder_lines(row: DecoderRow) -> list[str]:
    """Sentences of a plan's summary."""
    types = " and ".join(row.cache_dtypes)
    kind = " parts" if row.is_cut else ""
    places = [
        f"{row.caches[device]}{kind} of {types} on the {device.value.upper()} in"
        f" {format_bytes(row.cache_bytes[device])}"
        for device in row.caches
    ]
    each_bytes = sum(row.cache_bytes.values()) // row.positions
    heads = ", their heads divided between both devices" if row.is_cut else ""
    lines = [
        f"Caches stay in place{heads}, {' and '.join(places)}: room for {plural(row.positions, 'token')}"
        f" of {format_bytes(each_bytes)} each."
    ]
    if row.sequences and row.tokens and row.tokens_per_s:
        of = "" if row.sequences == 1 else f" of each of {row.sequences:,} sequences"
        lines.append(
            f"A run reads {plural(row.tokens, 'new token')}{of}: {row.tokens_per_s:,.1f} tokens a second"
            " are predicted."
        )
    if row.others:
        unit = " tokens a second" if row.tokens_per_s else ""
        told = ", ".join(map(str, row.others))
        lines.append(f"Within this budget the same simulator predicts of others' ways: {told}{unit}.")
    return lines
