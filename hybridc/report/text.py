"""A plan report as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hybridc.ir import Device, Lane
from hybridc.options import format_budget, format_bytes
from hybridc.report.binding import binding_line
from hybridc.report.decoder import decoder_lines
from hybridc.report.lanes import LaneRow
from hybridc.report.memory import ByteRow
from hybridc.report.plan_report import CopyRow, DeviceRow, KernelRow, Report
from hybridc.report.table import Column, format_us, plural, printable, render_table
from hybridc.report.trace import LANE_TITLES

SHORT_ROWS = 24
"""Rows of a table that is not shown in full: kernels, copies and memory then fit on a tall terminal."""

_INDENT = "  "
_KERNEL_COLUMNS = (
    Column("step", numeric=True),
    Column("on"),
    Column("time", numeric=True),
    Column("footprint", numeric=True, dispensable=2),
    Column("kernel", least=10, dispensable=1),
    Column("ONNX nodes", least=10),
    Column("why", least=23),  # "transfer costs too much"
)
_COPY_COLUMNS = (
    Column("step", numeric=True),
    Column("from"),
    Column("to"),
    Column("time", numeric=True),
    Column("size", numeric=True),
    Column("tensor", least=16),
)
_MEMORY_COLUMNS = (
    Column("on"),
    Column("kernels", numeric=True),
    Column("weights", numeric=True),
    Column("peak", numeric=True),
    Column("budget", numeric=True),
    Column("used", numeric=True),
    Column("lower bound", numeric=True, dispensable=1),
    Column("peak/bound", numeric=True, dispensable=2),
)
_BYTE_COLUMNS = (
    Column("GPU memory for"),
    Column("buffers", numeric=True),
    Column("most at once", numeric=True),
    Column("at the peak", numeric=True),
)
_LANE_COLUMNS = (
    Column("lane"),
    Column("steps", numeric=True),
    Column("busy", numeric=True),
    Column("of the run", numeric=True),
    Column("copied", numeric=True),
)


def render_text(report: Report, title: str, *, everything: bool = False, width: int | None = None) -> str:
    """Tables of kernels, copies and memory, ending in a newline; long ones cut short unless `everything`.

    Tables are `width` characters wide at most; None: as wide as their texts.
    """
    limit = None if everything else SHORT_ROWS

    def table(columns: Sequence[Column], rows: Iterable[tuple[str, ...]]) -> list[str]:
        return render_table(columns, list(rows), None if width is None else width - len(_INDENT))

    lines = [printable(title), ""]
    lines += _section(
        f"Kernels ({len(report.kernels):,})",
        table(_KERNEL_COLUMNS, map(_kernel_cells, report.kernels[:limit])),
        len(report.kernels[limit:]) if limit else 0,
    )
    if report.copies:
        lines += _section(
            f"Copies ({len(report.copies):,})",
            table(_COPY_COLUMNS, map(_copy_cells, report.copies[:limit])),
            len(report.copies[limit:]) if limit else 0,
        )
    lines += _section("Memory", table(_MEMORY_COLUMNS, map(_memory_cells, report.devices)), 0)
    if report.gpu_bytes:
        lines += _section("GPU memory by class", table(_BYTE_COLUMNS, map(_byte_cells, report.gpu_bytes)), 0)
    lines += _section("Placement", table(_LANE_COLUMNS, map(_lane_cells, report.lanes)), 0)
    return "\n".join(lines + summary_lines(report)) + "\n"


def _section(heading: str, table: list[str], hidden: int) -> list[str]:
    more = [f"... {plural(hidden, 'more row')}; --all shows them"] if hidden else []
    return [heading, *(_INDENT + line for line in (*table, *more)), ""]


def _kernel_cells(row: KernelRow) -> tuple[str, ...]:
    return (
        str(row.step),
        row.device.value,
        format_us(row.time_us),
        format_bytes(row.footprint_bytes),
        row.kernel,
        ", ".join(row.origins),
        f"{row.reason}; {row.condition}" if row.condition else row.reason,
    )


def _copy_cells(row: CopyRow) -> tuple[str, ...]:
    return (
        str(row.step),
        row.source.value,
        row.target.value,
        format_us(row.time_us),
        format_bytes(row.size_bytes),
        row.tensor,
    )


def _memory_cells(row: DeviceRow) -> tuple[str, ...]:
    bound = row.lower_bound_bytes
    return (
        row.device.value,
        f"{row.kernels:,}",
        format_bytes(row.weight_bytes),
        format_bytes(row.peak_bytes),
        format_bytes(row.budget_bytes) if row.budget_bytes is not None else "no limit",
        f"{row.peak_bytes / row.budget_bytes:.1%}" if row.budget_bytes else "-",
        format_bytes(bound),
        f"{row.peak_bytes / bound:.3f}" if bound else "-",
    )


def _byte_cells(row: ByteRow) -> tuple[str, ...]:
    return (
        row.byte_class.value,
        f"{row.buffers:,}",
        format_bytes(row.most_bytes),
        format_bytes(row.peak_bytes),
    )


def _lane_cells(row: LaneRow) -> tuple[str, ...]:
    copied = format_bytes(row.copied_bytes) if row.lane in (Lane.H2D, Lane.D2H) else "-"
    return LANE_TITLES[row.lane], f"{row.steps:,}", format_us(row.busy_us), f"{row.share:.0%}", copied


def summary_lines(report: Report) -> list[str]:
    """Sentences with the figures that matter most."""
    lines = []
    if report.all_gpu_peak_bytes is not None and any(row.device is Device.GPU for row in report.devices):
        line = f"When fully GPU-resident the model needs {format_bytes(report.all_gpu_peak_bytes)}"
        if report.smallest_budget_bytes is not None:
            smallest = format_budget(report.smallest_budget_bytes)
            works = f"the smallest budget that works is {smallest}" if report.smallest_budget_bytes else ""
            if works and report.smallest_bytes_bound:
                works += f", and no plan needs less than {format_budget(report.smallest_bytes_bound)}"
            line += f"; {works or 'any budget works'}"
        lines.append(line + ".")
    lines.append(f"Predicted run: {format_us(report.makespan_us)}{_against_bound(report)}.")
    lines += [] if report.decoder is None else decoder_lines(report.decoder)
    lines += [line for line in (binding_line(report.binding), report.bound_line) if line]
    conditional = sum(bool(row.condition) for row in report.kernels)
    if conditional:
        lines.append(
            f"Data decide which of {plural(conditional, 'kernel')} a run executes; the predicted time is that"
            " of all of them, and the memory is the same in any case."
        )
    sources = Counter(row.time_source for row in report.kernels if row.time_source is not None)
    if sources:
        told = ", ".join(f"{count:,} {source}" for source, count in sorted(sources.items()))
        lines.append(f"Kernel times: {told}.")
    if report.channels_last:
        lines.append(f"{plural(report.channels_last, 'tensor')} between kernels have channels last.")
    lines += [_against_bytes_bound(row) for row in report.devices if row.device is Device.GPU and row.kernels]
    if report.hidden_copy_share is not None:
        lines.append(f"{report.hidden_copy_share:.0%} of the copies' time is hidden behind kernels.")
    return lines


def _against_bytes_bound(row: DeviceRow) -> str:
    """How far the arena is from the bytes that the plan's steps hold at once."""
    gap = row.peak_bytes / row.lower_bound_bytes - 1 if row.lower_bound_bytes else 0.0
    told = f"GPU memory: {format_bytes(row.peak_bytes)}"
    unused_bytes = row.budget_bytes - row.peak_bytes if row.budget_bytes is not None else 0
    unused = f" {format_bytes(unused_bytes)} of the budget are not used." if unused_bytes > 0 else ""
    if gap < 5e-4:
        return f"{told}, all of it held at once.{unused}"
    held = format_bytes(row.lower_bound_bytes)
    return f"{told}, of which {held} are held at once, a gap of {gap:.1%}.{unused}"


def _against_bound(report: Report) -> str:
    """How far the plan is from what is proven to be impossible."""
    if not report.time_bound_us:
        return ""
    gap = report.makespan_us / report.time_bound_us - 1
    if gap < 5e-4:
        return ", which no plan of these kernels in this order can beat"
    least = format_us(report.time_bound_us)
    return f"; no plan of these kernels in this order takes less than {least}, a gap of {gap:.1%}"
