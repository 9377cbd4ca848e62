"""Expressions and statements rebuilt by callbacks that say themselves what becomes of what is below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import tvm_ffi
from tvm import ir, tirx
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


def renamed(function: tirx.PrimFunc, params: Sequence[ir.Var]) -> tirx.PrimFunc:
    """The function with other variables for its parameters, of the same types."""
    new = dict(zip(function.params, params, strict=True))
    body = tvm_ffi.structural_map(function.body, (ir.Var, lambda v: new.get(v, v)))
    return tirx.PrimFunc(list(params), body, function.ret_type, function.attrs)
