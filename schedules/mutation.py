"""Expressions and statements rebuilt by callbacks that say themselves what becomes of what is below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tvm_ffi import StructuralMutator, structural

Kinds = type | tuple[type, ...]
Rebuild = Callable[[Any, StructuralMutator], Any]


def mutate(root: Any, callbacks: Sequence[tuple[Kinds, Rebuild]]) -> Any:
    """What `tvm_ffi.structural_mutate` makes of a node.

    That asks Python for the signature of each callback, in case it takes a third argument: for an index of
    three nodes this is 30 times what the rebuilding takes, and a tenth of what a small network needs.
    """
    entries = [
        (_type_index(kind), rebuild, False)
        for kinds, rebuild in callbacks
        for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
    ]
    return structural._ffi_api.StructuralMutate(root, entries)


@cache
def _type_index(kind: type) -> int:
    return structural._callback_type_to_type_index(kind, api_name="mutate")
