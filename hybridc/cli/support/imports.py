"""Imports of a command, which take longer than many a network."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridc.garbage import uncollected

_TENSORS_OF_OTHERS = "torch"


@contextmanager
def lasting_imports() -> Iterator[None]:
    """For the imports of what a command does.

    Modules stay to the end: no collection looks at them again and again, now or later, which takes a fifth
    of the time. TVM imports torch wherever it is installed, so as to take its tensors. No command has any,
    and torch takes as long as all the rest, and 200 MB; it is not found meanwhile.
    """
    modules: dict[str, Any] = sys.modules
    hides = _TENSORS_OF_OTHERS not in modules
    if hides:
        modules[_TENSORS_OF_OTHERS] = None
    with uncollected():
        try:
            yield
        finally:
            if hides:
                del modules[_TENSORS_OF_OTHERS]
            gc.freeze()
