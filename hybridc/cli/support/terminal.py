"""How wide standard output is, and texts that fit it."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap


def output_width() -> int | None:
    """Characters of a line of the terminal, or what COLUMNS says; None: a file or a pipe has no width."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_terminal or "COLUMNS" in os.environ else None


def print_text(text: str) -> None:
    """Print lines; those wider than the terminal are continued on the next, further in. Paths stay whole."""
    width = output_width()
    for line in text.rstrip("\n").split("\n"):
        print(line if width is None else "\n".join(_continued(line, width)))


def _continued(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())] + "  "
    wrapped = textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapped or [""]
