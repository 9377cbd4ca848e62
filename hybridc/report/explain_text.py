"""An explanation in words."""

from __future__ import annotations

import textwrap

from hybridc.ir import Device
from hybridc.options import format_bytes
from hybridc.passes.planner.model.cost import TimeSource
from hybridc.report.binding import binding_line
from hybridc.report.explain import Alternative, Explanation, TensorFact
from hybridc.report.reasons import other_device
from hybridc.report.table import Column, format_us, printable, render_table

_WIDTH = 100
"""Of paragraphs where the terminal is no narrower: longer lines are hard to read."""
_COLUMNS = (
    Column("instead", least=20),
    Column("run", numeric=True, least=10),
    Column("GPU memory", numeric=True),
)
_NO_CHANGE_US = 0.005


def render_explanation(explanation: Explanation, width: int | None = None) -> str:
    """Paragraphs of at most 100 characters and a table of at most `width`, ending in a newline.

    Paragraphs are no wider than `width` either. None: nothing of the table is cut.
    """
    widest = min(width or _WIDTH, _WIDTH)
    lines = [_heading(explanation), "", *_wrapped(_placement(explanation), widest), ""]
    if explanation.binding:
        told = f"{binding_line(explanation.binding)} {explanation.bound_line}".rstrip()
        lines += [*_wrapped(told, widest), ""]
    if explanation.tensors:
        lines += ["Tensors", *(line for fact in explanation.tensors for line in _tensor(fact, widest)), ""]
    if explanation.alternatives:
        rows = [_cells(alternative) for alternative in explanation.alternatives]
        lines += ["Simulated alternatives"]
        lines += [f"  {line}" for line in render_table(_COLUMNS, rows, width and width - 2)]
        notes = {a.note: None for a in explanation.alternatives if a.change_us is not None}
        lines += [f"  Each {note}." for note in notes] if len(notes) == 1 else []
    return "\n".join(printable(line) for line in lines).rstrip() + "\n"


def _heading(explanation: Explanation) -> str:
    nodes = ", ".join(explanation.origins)
    return f"{explanation.kernel} ({nodes})" if nodes else explanation.kernel


def _placement(explanation: Explanation) -> str:
    here, there = explanation.device, other_device(explanation.device)
    words = [
        f"Runs on the {here.upper()} from {format_us(explanation.start_us)} to"
        f" {format_us(explanation.end_us)} of {format_us(explanation.makespan_us)},"
        f" as step {explanation.step}: {explanation.reason}."
    ]
    if explanation.condition:
        words.append(f"A run executes it only {explanation.condition}.")
    here_us, there_us = explanation.device_us[here], explanation.device_us[there]
    if here_us is not None and there_us is not None:
        by_itself = f"By itself it takes {format_us(here_us)} there"
        words.append(f"{by_itself}, and {format_us(there_us)} on the {there.upper()}.")
    words.append(_sources(explanation.time_sources))
    if explanation.precision != "fp32":
        words.append(f"It multiplies {explanation.precision} numbers.")
    elif explanation.precision_note:
        words.append(f"It was kept in fp32, as {explanation.precision_note}.")
    if explanation.device_us[Device.GPU] is None:
        return " ".join(words)
    needs = f"The GPU needs {format_bytes(explanation.footprint_bytes)} to run it"
    if explanation.budget_bytes is None:
        words.append(f"{needs}; there is no limit.")
    else:
        words.append(f"{needs}, of a budget of {format_bytes(explanation.budget_bytes)}.")
    if explanation.unused_bytes:
        words.append(f"The plan leaves {format_bytes(explanation.unused_bytes)} of it unused.")
    return " ".join(words)


def _sources(sources: dict[Device, TimeSource]) -> str:
    return " ".join(f"The time on the {device.upper()} is {source}." for device, source in sources.items())


def _wrapped(text: str, widest: int, indent: str = "") -> list[str]:
    hanging = indent + "  " * bool(indent)
    return textwrap.wrap(printable(text), widest, initial_indent=indent, subsequent_indent=hanging)


def _tensor(fact: TensorFact, widest: int) -> list[str]:
    size = format_bytes(fact.size_bytes)
    about = (
        f"{fact.use} {fact.tensor} ({fact.role.value}, {size}): {'; '.join(fact.facts) or 'not used again'}"
    )
    return _wrapped(about, widest, "  ")


def _cells(alternative: Alternative) -> tuple[str, str, str]:
    if alternative.change_us is None or alternative.change_bytes is None:
        return alternative.what, alternative.note, "-"
    return alternative.what, _change_us(alternative.change_us), _change_bytes(alternative.change_bytes)


def _change_us(change_us: float) -> str:
    if abs(change_us) < _NO_CHANGE_US:
        return "as fast"
    return f"{'+' if change_us > 0 else '-'}{format_us(abs(change_us))}"


def _change_bytes(change_bytes: int) -> str:
    return (
        f"{'+' if change_bytes > 0 else '-'}{format_bytes(abs(change_bytes))}" if change_bytes else "the same"
    )
