"""Plain text tables, and numbers written for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, whether it is a number, and the width at which text is cut."""

    heading: str
    numeric: bool = False
    widest: int = 24


def render_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table without a frame: texts left, numbers right, columns as wide as they need."""
    cells = [
        [cut(printable(cell), column.widest) for cell, column in zip(row, columns, strict=True)]
        for row in rows
    ]
    cells.insert(0, [column.heading for column in columns])
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        return GAP.join(
            cell.rjust(width) if column.numeric else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()

    return [line(row) for row in cells]


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
