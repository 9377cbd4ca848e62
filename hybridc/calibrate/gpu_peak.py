"""A kernel that does nothing but multiply and add, for measuring what a GPU can do at most."""

from __future__ import annotations

from tvm import ir, s_tir, tirx
from tvm.ir import Range

from hybridc.schedules.cpu.core.micro_kernel import integer, loop, unrolled
from hybridc.schedules.cuda.core.launch import BLOCK_THREADS, cuda_target, finish_function
from hybridc.schedules.rule import Scheduled
from hybridc.targets import Target

_BLOCKS = 4096
_STEPS = 1024
_ACCUMULATORS = 8
"""Sums of a thread, so that none of its multiply-adds waits for the one before it."""
_UNROLLED = 8
"""Steps between two tests whether the loop has ended."""


def multiply_adds(target: Target, blocks: int = _BLOCKS, steps: int = _STEPS) -> tuple[Scheduled, int]:
    """A function of (values [2], result [blocks, 256]), and its operations, a multiply-add being two.

    Each thread does `acc = acc * values[0] + values[1]` in registers, `steps` times for each accumulator:
    a multiple of eight.
    """
    values = tirx.decl_buffer((2,), "float32", "values")
    result = tirx.decl_buffer((blocks, BLOCK_THREADS), "float32", "result")
    sums = tirx.decl_buffer((_ACCUMULATORS,), "float32", "sums", scope="local")

    def value(i: int) -> ir.Expr:
        return tirx.BufferLoad(values, [integer(i)])

    def start(i: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(sums, tirx.Cast("float32", i), [i])

    def add(i: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(sums, tirx.BufferLoad(sums, [i]) * value(0) + value(1), [i])

    block, thread = tirx.Var("bx", "int64"), tirx.Var("tx", "int64")
    total = sum((tirx.BufferLoad(sums, [integer(i)]) for i in range(_ACCUMULATORS)), value(1))
    body = tirx.SeqStmt(
        [
            unrolled(_ACCUMULATORS, start),
            loop(steps // _UNROLLED, lambda _: unrolled(_UNROLLED, lambda _: unrolled(_ACCUMULATORS, add))),
            tirx.BufferStore(result, total, [block, thread]),
        ]
    )
    body = _bound(thread, "threadIdx.x", BLOCK_THREADS, body)
    root = s_tir.SBlock([], [], [], "root", _bound(block, "blockIdx.x", blocks, body), alloc_buffers=[sums])
    function = tirx.PrimFunc([values, result], s_tir.SBlockRealize([], True, root))
    scheduled = finish_function(function, "multiply_adds", cuda_target(target))
    assert scheduled is not None
    return scheduled, 2 * blocks * BLOCK_THREADS * steps * _ACCUMULATORS


def _bound(var: ir.Var, tag: str, extent: int, body: tirx.Stmt) -> tirx.For:
    index = tirx.IterVar(
        Range(integer(0), integer(extent)), tirx.Var(tag, "int64"), tirx.IterVar.ThreadIndex, tag
    )
    return tirx.For(var, integer(0), integer(extent), tirx.ForKind.THREAD_BINDING, body, index)
