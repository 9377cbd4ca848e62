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


_SELDOM = (100_000, 50, 100)
"""Thresholds of collections. Graphs of a network are circles of objects, a few thousand each; Python looks
for circles after every 700 objects, and a tenth of the time that eight buckets take to compile goes there."""


@contextmanager
def collected_anew() -> Iterator[None]:
    """Only what is made meanwhile is looked at, and seldom: not all that modules keep, again and again."""
    is_outer, thresholds = not gc.get_freeze_count(), gc.get_threshold()
    if is_outer:
        gc.freeze()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_outer:
            gc.unfreeze()
