"""Global intermediates of a scheduled function become parameters, so that a run never allocates."""

from __future__ import annotations

import math

from tvm import s_tir, tirx
from tvm.s_tir.analysis import detect_buffer_access_lca

from hybridc.ir.graph import dtype_bits


def lift_workspace(function: tirx.PrimFunc) -> tuple[tirx.PrimFunc, tuple[int, ...]]:
    """Turn global-scope allocations that several loop nests share into trailing parameters.

    TVM would lower such a buffer to a device or heap allocation in every run. Buffers in other
    scopes stay, and so do those that a single loop nest uses: lowering shrinks them into that nest.
    (The nest is found as TVM's own lowering finds it, by the lowest common ancestor of all accesses.)

    Returns the function and the bytes of each added parameter, in the order of the parameters.
    """
    if not isinstance(function.body, s_tir.SBlockRealize):
        return function, ()
    root = function.body.block
    ancestor = {
        buffer: stmt for buffer, stmt in detect_buffer_access_lca(function).items() if stmt is not None
    }
    # accesses in several nests have the root as their lowest common ancestor
    lifted = [b for b in root.alloc_buffers if b.scope() == "global" and root.same_as(ancestor.get(b))]
    if not lifted:
        return function, ()
    kept = [b for b in root.alloc_buffers if not any(b.same_as(other) for other in lifted)]
    parameters = [*function.params, *lifted]
    body = s_tir.SBlockRealize(function.body.iter_values, function.body.predicate, _with_buffers(root, kept))
    return (
        tirx.PrimFunc(parameters, body, function.ret_type, function.attrs, function.span),
        tuple(_size_bytes(buffer) for buffer in lifted),
    )


def _with_buffers(block: s_tir.SBlock, alloc_buffers: list[tirx.Var]) -> s_tir.SBlock:
    return s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        block.body,
        block.init,
        alloc_buffers,
        block.match_buffers,
        block.annotations,
        block.span,
    )


def _size_bytes(buffer: tirx.Var) -> int:
    elements = math.prod(int(extent) for extent in buffer.shape)
    return (elements * dtype_bits(str(buffer.dtype)) + 7) // 8
