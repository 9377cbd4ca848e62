"""Plain text tables, and numbers written for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, whether it is a number, and what becomes of it on a narrow terminal."""

    heading: str
    numeric: bool = False
    least: int | None = None
    """Characters that its texts may be cut to; None: they are never cut."""
    dispensable: int = 0
    """Where cutting is not enough, the column of the highest rank is left out first; never that of rank 0."""


def render_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None
) -> list[str]:
    """Lines of a table without a frame: texts left, numbers right, columns as wide as they need.

    Of `width` characters at most, if that is possible: what has most to spare is cut first, then columns are
    left out, and a last line names those. None: nothing is cut.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    shown = _shown(columns, cells, width)
    widths = _widths([columns[i] for i in shown], [[row[i] for i in shown] for row in cells], width)

    def line(row: Sequence[str]) -> str:
        return GAP.join(
            cut(row[i], size).rjust(size) if columns[i].numeric else cut(row[i], size).ljust(size)
            for i, size in zip(shown, widths, strict=True)
        ).rstrip()

    left_out = [column.heading for i, column in enumerate(columns) if i not in shown]
    told = [f"(no room for {', '.join(left_out)})"] if left_out else []
    return [*map(line, [[column.heading for column in columns], *cells]), *told]


def _shown(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Positions of the columns that there is room for."""
    shown = list(range(len(columns)))
    least = [_least(column, size) for column, size in zip(columns, _natural(columns, cells), strict=True)]
    while width is not None and sum(least[i] for i in shown) + len(GAP) * (len(shown) - 1) > width:
        first = max(shown, key=lambda i: columns[i].dispensable)
        if not columns[first].dispensable:
            break
        shown.remove(first)
    return shown


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """How wide each column is."""
    sizes = _natural(columns, cells)
    excess = 0 if width is None else sum(sizes) + len(GAP) * (len(sizes) - 1) - width
    for _ in range(excess):
        spare = [size - _least(column, size) for column, size in zip(columns, sizes, strict=True)]
        if not any(spare):
            break
        sizes[spare.index(max(spare))] -= 1
    return sizes


def _natural(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(column.heading), *(len(row[i]) for row in cells), 0) for i, column in enumerate(columns)]


def _least(column: Column, size: int) -> int:
    return size if column.least is None else min(size, max(column.least, len(column.heading)))


def cut(text: str, widest: int) -> str:
    """Text of at most `widest` characters. The middle is left out: names differ at their ends."""
    if len(text) <= widest:
        return text
    tail = (widest - 2) // 2
    return f"{text[: widest - 2 - tail]}..{text[len(text) - tail :]}"


def printable(text: str) -> str:
    """A name of a model as one line of a terminal: names are the model's, and may hold anything."""
    return "".join(c if c.isprintable() else "?" for c in text)


def format_us(time_us: float) -> str:
    """A time to three digits: `0.45 us`, `12.3 us`, `1.24 ms`, `2.31 s`."""
    for unit, scale in (("us", 1.0), ("ms", 1e3), ("s", 1e6)):
        value = time_us / scale
        if value < 999.5 or unit == "s":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """`1 copy`, `3 copies`."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
