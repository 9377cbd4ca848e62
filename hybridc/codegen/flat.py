"""Scheduled functions of the CPU with one index for each access, as TVM compiles them.

Rows that lie behind each other are read by one product of the row's number, whatever axes they are divided
into: without this a function of [8, 16, 32] divides a row by 16, which one of [1, 32, 32] does not.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from hybridc.checks import CHECKS

_PASSES = (
    s_tir.transform.CanonicalizeLoop,
    s_tir.transform.LowerInitBlock,
    s_tir.transform.PlanAndUpdateBufferAllocationLocation,
    s_tir.transform.ConvertBlocksToOpaque,
    s_tir.transform.CompactBufferAllocation,
    s_tir.transform.LowerMatchBuffer,
    s_tir.transform.LowerOpaqueBlock,
    tirx.transform.FlattenBuffer,
    s_tir.transform.StmtSimplify,
)
"""The first ones of TVM's pipeline for a CPU; the others are in `cpu.py`.

Statements are simplified once, behind the last of them, and not in front of `LowerOpaqueBlock`, too: of axes
that are simplified one by one some indices of rows stay apart, divided and added up again.
"""


def flattened(functions: Mapping[str, tirx.PrimFunc]) -> dict[str, tirx.PrimFunc]:
    """The functions, in the same order, without blocks, their buffers of one dimension but for parameters.

    What the runtime checks, which no code depends on, is left out of their attributes.
    """
    bare = {
        name: function.without_attr(CHECKS) if CHECKS in function.attrs else function
        for name, function in functions.items()
    }
    loops = {name for name, function in bare.items() if _is_loops(function)}
    made: dict[str, tirx.PrimFunc] = {}
    for is_loops in (False, True):
        chosen = {name: function for name, function in bare.items() if (name in loops) == is_loops}
        # what has no blocks has been compacted; to do so again takes long where data decide an index
        unneeded = s_tir.transform.CompactBufferAllocation if is_loops else None
        passes = [each() for each in _PASSES if each is not unneeded]
        module = tvm.ir.transform.Sequential(passes)(tvm.IRModule(chosen))
        made |= {name: module[name] for name in chosen}
    return {name: made[name] for name in functions}


def _is_loops(function: tirx.PrimFunc) -> bool:
    """Whether there are no blocks in a function."""
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, found.append))
    return not found
