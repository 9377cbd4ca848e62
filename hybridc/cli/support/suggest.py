"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], listing: str) -> str:
    """`did you mean 'compile'?` if a known name is close to `word`, else all of them: `commands are ...`."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"{listing} {', '.join(names)}" if names else ""
