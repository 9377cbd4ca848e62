"""Python's collector of garbage, where it would look in vain."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile: for what makes many objects, and few circles that are not kept."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def collected_anew() -> Iterator[None]:
    """Only what is made meanwhile is looked at: not all that modules keep, again and again."""
    is_outer = not gc.get_freeze_count()
    if is_outer:
        gc.freeze()
    try:
        yield
    finally:
        if is_outer:
            gc.unfreeze()
