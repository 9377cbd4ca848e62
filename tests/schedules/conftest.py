"""Of a test's many cases the fast suite has some: the others are slow ones."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path

import pytest

from hybridc.targets import ISAS

FOLDER = Path(__file__).parent
TOGETHER = "test_family_computes_what_numpy_says"
"""Its cases are one library, whichever of them run: of all kinds of kernels for a GPU."""
CASES = 3
"""In the fast suite, of each test and instruction set. Every case compiles a kernel, in 0.2 s at best: all of
them, more than two thousand, took a quarter of the suite's time."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases are drawn by their names: the same ones each time."""
    groups: dict[Hashable, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or item.originalname == TOGETHER:
            continue
        if item.path.is_relative_to(FOLDER):
            groups[item.path, item.originalname, _isas(item)].append(item)
    for cases in groups.values():
        for item in sorted(cases, key=_drawn)[CASES:]:
            item.add_marker(pytest.mark.slow)


def _isas(item: pytest.Function) -> frozenset[str]:
    return frozenset(marker.args[0] for marker in item.iter_markers("isa")) | ISAS.keys() & _words(item)


def _words(item: pytest.Function) -> set[str]:
    return set(item.callspec.id.split("-")) if hasattr(item, "callspec") else set()


def _drawn(item: pytest.Function) -> str:
    return hashlib.sha256(item.name.encode()).hexdigest()
