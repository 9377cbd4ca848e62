"""What a processor can do at most on some threads: multiply-adds in registers, and copies of memory."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from functools import cache
from itertools import cycle

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx

from hybridc.passes.lower.lower import llvm_target
from hybridc.schedules.cpu.core.dot_products import dot_of_bf16
from hybridc.schedules.cpu.core.micro_kernel import grid, integer, loop, unrolled, vectorized
from hybridc.targets import Isa, native_isa
from hybridc.tuning.measure import CACHE_BYTES, LEAST_SET_BYTES

_STEPS = 1 << 15
_RUNS = 11
_COPY_SECONDS = 0.03
_PAGE_BYTES = 4096


def peak_gflops(isa: Isa, threads: int) -> float:
    """Multiply-adds in registers, as two operations each: median of a few runs of a millisecond."""
    accumulators = isa.vector_registers * 3 // 4  # independent, so that none waits for the one before it
    run = _multiply_adds(isa, threads, accumulators)
    values = tvm.runtime.tensor(np.array([0.5, 1.0], "float32"))
    result = tvm.runtime.tensor(np.zeros((threads, accumulators, isa.lanes()), "float32"))
    run(values, result)
    seconds = statistics.median(_timed(lambda: run(values, result)) for _ in range(_RUNS))
    return 2 * _STEPS * threads * accumulators * isa.lanes() / seconds / 1e9


def bf16_speedup(isa: Isa) -> float:
    """Operations a second of packed lanes of bf16 in registers, over those of multiply-adds of floats.

    On one thread, in turns; medians. Requires: an instruction set with bf16.
    """
    accumulators = isa.vector_registers * 3 // 4
    values = tvm.runtime.tensor(np.array([0.5, 1.0], "float32"))
    words = tvm.runtime.tensor(np.zeros(isa.lanes(), "int32"))
    result = tvm.runtime.tensor(np.zeros((1, accumulators, isa.lanes()), "float32"))
    floats, pairs = _multiply_adds(isa, 1, accumulators), _dot_products(isa, accumulators)
    times = [
        (_timed(lambda: floats(values, result)), _timed(lambda: pairs(words, result))) for _ in range(_RUNS)
    ]
    of_floats, of_pairs = map(statistics.median, zip(*times, strict=True))
    return 2 * of_floats / of_pairs


def copy_gb_s(size_bytes: int, threads: int) -> float:
    """Bytes read and written a second by `memcpy` of `size_bytes` that no cache holds, on one thread or on
    all of them, whichever is faster."""
    pairs = _pairs(size_bytes)
    return max(_copy_gb_s(_copy(size_bytes, count), pairs, size_bytes) for count in {1, threads})


def copying(size_bytes: int, threads: int) -> Callable[[], int]:
    """Copies `size_bytes` that no cache holds on so many threads, and returns the bytes read and written."""
    run, pairs = _copy(size_bytes, threads), cycle(_pairs(size_bytes))

    def copy() -> int:
        run(*next(pairs))
        return 2 * size_bytes

    return copy


def _pairs(size_bytes: int) -> list[list[tvm_ffi.Tensor]]:
    """Sources and targets for copies, more of them than caches hold."""
    count = max(2, CACHE_BYTES // max(2 * size_bytes, LEAST_SET_BYTES))
    stride = -(-size_bytes // _PAGE_BYTES + 1) * _PAGE_BYTES  # as if each were allocated by itself
    memory = _memory(1 << (2 * count * stride).bit_length())
    views = [tvm_ffi.from_dlpack(memory[i * stride :][:size_bytes]) for i in range(2 * count)]
    return [[source, target] for source, target in zip(views[::2], views[1::2], strict=True)]


@cache
def _memory(size_bytes: int) -> np.ndarray:
    """Bytes that begin with a page, each page written once: else all of them may be one page of zeros."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), "uint8")
    memory[:] = 1
    return memory


def _copy_gb_s(run: Callable[..., None], pairs: list[list[tvm_ffi.Tensor]], size_bytes: int) -> float:
    times: list[float] = []
    end = time.perf_counter() + _COPY_SECONDS
    while len(times) < _RUNS or time.perf_counter() < end:
        pair = pairs[len(times) % len(pairs)]
        times.append(_timed(lambda: run(*pair)))  # noqa: B023 - called at once
    return 2 * size_bytes / statistics.median(times) / 1e9


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@cache
def _multiply_adds(isa: Isa, threads: int, accumulators: int) -> Callable[..., None]:
    """`acc = acc * a + b` for every accumulator, again and again: nothing can be moved out of the loop."""
    values = tirx.decl_buffer((2,), "float32", "values")
    result = tirx.decl_buffer((threads, accumulators, isa.lanes()), "float32", "result")
    sums = tirx.decl_buffer((accumulators, isa.lanes()), "float32", "sums", scope="local")

    def every(body: Callable[[ir.Expr, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        return unrolled(accumulators, lambda i: vectorized(isa.lanes(), lambda lane: body(i, lane)))

    def value(i: int) -> ir.Expr:
        return tirx.BufferLoad(values, [integer(i)])

    def add(i: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(sums, tirx.BufferLoad(sums, [i, lane]) * value(0) + value(1), [i, lane])

    def task(thread: ir.Expr) -> tirx.Stmt:
        return tirx.SeqStmt(
            [
                every(lambda i, lane: tirx.BufferStore(sums, tirx.FloatImm("float32", 1.0), [i, lane])),
                loop(_STEPS, lambda _: every(add)),
                every(
                    lambda i, lane: tirx.BufferStore(
                        result, tirx.BufferLoad(sums, [i, lane]), [thread, i, lane]
                    )
                ),
            ]
        )

    body = grid((threads,), lambda point: task(point[0]), parallel=True)
    return _compiled([values, result], body, [sums], isa)


@cache
def _dot_products(isa: Isa, accumulators: int) -> Callable[..., None]:
    """As many dot products of pairs, each added to an accumulator, on one thread."""
    dot = dot_of_bf16(isa)
    assert dot is not None
    words = tirx.decl_buffer((isa.lanes(),), "int32", "words")
    result = tirx.decl_buffer((1, accumulators, isa.lanes()), "float32", "result")
    sums = tirx.decl_buffer((accumulators, isa.lanes()), "float32", "sums", scope="local")
    lane = tirx.Ramp(integer(0), integer(1), isa.lanes())

    def add(i: ir.Expr) -> tirx.Stmt:
        word = tirx.BufferLoad(words, [lane])
        total = dot.multiply_add_vector(tirx.BufferLoad(sums, [i, lane]), word, word)
        return tirx.BufferStore(sums, total, [i, lane])

    zero = tirx.Broadcast(tirx.FloatImm("float32", 0.0), isa.lanes())
    body = tirx.SeqStmt(
        [
            unrolled(accumulators, lambda i: tirx.BufferStore(sums, zero, [i, lane])),
            loop(_STEPS, lambda _: unrolled(accumulators, add)),
            unrolled(
                accumulators,
                lambda i: tirx.BufferStore(result, tirx.BufferLoad(sums, [i, lane]), [integer(0), i, lane]),
            ),
        ]
    )
    return _compiled([words, result], dot.within(body), [sums], isa)


@cache
def _copy(size_bytes: int, threads: int) -> Callable[..., None]:
    source, target = (tirx.decl_buffer((size_bytes,), "uint8", name) for name in ("source", "target"))
    share = -(-size_bytes // threads)

    def task(thread: ir.Expr) -> tirx.Stmt:
        start = thread * integer(share)
        count = tirx.min(integer(share), integer(size_bytes) - start)
        ends = [tirx.address_of(tirx.BufferLoad(buffer, [start])) for buffer in (target, source)]
        return tirx.Evaluate(tirx.call_extern("handle", "memcpy", *ends, count))

    body = grid((threads,), lambda point: task(point[0]), parallel=threads > 1)
    return _compiled([source, target], body, [], native_isa())


def _compiled(params: list[ir.Var], body: tirx.Stmt, buffers: list[ir.Var], isa: Isa) -> Callable[..., None]:
    root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=buffers)
    function = tirx.PrimFunc(params, s_tir.SBlockRealize([], True, root)).with_attrs(
        {"global_symbol": "main", "tirx.noalias": True}  # else LLVM keeps no accumulator in a register
    )
    return tvm.compile(tvm.IRModule({"main": function}), target=llvm_target(isa))["main"]
