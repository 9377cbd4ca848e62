"""A plan report as text of at most 100 columns."""

from __future__ import annotations

from hybridc.ir import Device, Lane
from hybridc.options import format_budget, format_bytes
from hybridc.report.plan_report import CopyRow, DeviceRow, KernelRow, Report
from hybridc.report.table import Column, format_us, plural, printable, render_table

SHORT_ROWS = 24
"""Rows of a table that is not shown in full: kernels, copies and memory then fit on a tall terminal."""

_KERNEL_COLUMNS = (
    Column("step", numeric=True),
    Column("on"),
    Column("time", numeric=True),
    Column("footprint", numeric=True),
    Column("kernel", widest=16),
    Column("ONNX nodes", widest=18),
    Column("why", widest=25),
)
_COPY_COLUMNS = (
    Column("step", numeric=True),
    Column("from"),
    Column("to"),
    Column("time", numeric=True),
    Column("size", numeric=True),
    Column("tensor", widest=60),
)
_MEMORY_COLUMNS = (
    Column("on"),
    Column("kernels", numeric=True),
    Column("weights", numeric=True),
    Column("peak", numeric=True),
    Column("budget", numeric=True),
    Column("used", numeric=True),
    Column("lower bound", numeric=True),
    Column("peak/bound", numeric=True),
)
_LANE_NAMES = {
    Lane.GPU: "GPU",
    Lane.CPU: "CPU",
    Lane.H2D: "copies to GPU",
    Lane.D2H: "copies to CPU",
}


def render_text(report: Report, title: str, *, everything: bool = False) -> str:
    """Tables of kernels, copies and memory, ending in a newline; long ones cut short unless `everything`."""
    limit = None if everything else SHORT_ROWS
    lines = [printable(title), ""]
    lines += _section(
        f"Kernels ({len(report.kernels):,})",
        render_table(_KERNEL_COLUMNS, [_kernel_cells(row) for row in report.kernels[:limit]]),
        len(report.kernels[limit:]) if limit else 0,
    )
    if report.copies:
        lines += _section(
            f"Copies ({len(report.copies):,})",
            render_table(_COPY_COLUMNS, [_copy_cells(row) for row in report.copies[:limit]]),
            len(report.copies[limit:]) if limit else 0,
        )
    lines += _section(
        "Memory", render_table(_MEMORY_COLUMNS, [_memory_cells(row) for row in report.devices]), 0
    )
    return "\n".join(lines + _closing(report)) + "\n"


def _section(heading: str, table: list[str], hidden: int) -> list[str]:
    more = [f"  ... {plural(hidden, 'more row')}; --all shows them"] if hidden else []
    return [heading, *(f"  {line}" for line in table), *more, ""]


def _kernel_cells(row: KernelRow) -> tuple[str, ...]:
    return (
        str(row.step),
        row.device.value,
        format_us(row.time_us),
        format_bytes(row.footprint_bytes),
        row.kernel,
        ", ".join(row.origins),
        row.reason,
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


def _closing(report: Report) -> list[str]:
    lines = []
    if report.all_gpu_peak_bytes is not None and any(row.device is Device.GPU for row in report.devices):
        smallest = report.smallest_budget_bytes
        line = f"Entirely on the GPU the model needs {format_bytes(report.all_gpu_peak_bytes)}"
        if smallest is not None:
            works = (
                f"the smallest budget that works is {format_budget(smallest)}"
                if smallest
                else "any budget works"
            )
            line += f"; {works}"
        lines.append(line + ".")
    busy = ", ".join(f"{_LANE_NAMES[row.lane]} {format_us(row.busy_us)}" for row in report.lanes)
    lines += [f"Predicted run: {format_us(report.makespan_us)}.", f"Busy: {busy or 'nothing'}."]
    return lines
