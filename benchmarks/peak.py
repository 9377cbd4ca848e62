"""What the machine can do at most: multiply-adds in registers, and copies of memory, on a number of threads.

python benchmarks/peak.py [--isa avx512] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache

import numpy as np
import tvm
from tvm import ir, s_tir, tirx

from hybridc.passes.lower import llvm_target
from hybridc.runtime.libraries import available_threads
from hybridc.schedules.cpu.tile import grid, integer, loop, unrolled, vectorized
from hybridc.targets import ISAS, Isa, native_isa
from hybridc.tuning.measure import CACHE_BYTES, LEAST_SET_BYTES, use_threads

_STEPS = 1 << 15
_RUNS = 11
_COPY_SECONDS = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", choices=ISAS, default=native_isa().name)
    parser.add_argument("--threads", type=int, default=available_threads())
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    print(f"{peak_gflops(ISAS[arguments.isa], arguments.threads):.0f} GFLOP/s")
    for size_bytes in (1 << 16, 1 << 20, 1 << 24, 1 << 27):
        print(f"copy of {size_bytes:,} bytes: {copy_gb_s(size_bytes, arguments.threads):.1f} GB/s")
    return 0


def peak_gflops(isa: Isa, threads: int) -> float:
    """Multiply-adds in registers, as two operations each: median of a few runs of a millisecond."""
    accumulators = isa.vector_registers * 3 // 4  # independent, so that none waits for the one before it
    run = _multiply_adds(isa, threads, accumulators)
    values = tvm.runtime.tensor(np.array([0.5, 1.0], "float32"))
    result = tvm.runtime.tensor(np.zeros((threads, accumulators, isa.lanes()), "float32"))
    run(values, result)
    seconds = statistics.median(_timed(lambda: run(values, result)) for _ in range(_RUNS))
    return 2 * _STEPS * threads * accumulators * isa.lanes() / seconds / 1e9


@cache
def copy_gb_s(size_bytes: int, threads: int) -> float:
    """Bytes read and written a second by `memcpy` of `size_bytes` that no cache holds, on one thread or on
    all of them, whichever is faster."""
    sets = max(2, CACHE_BYTES // max(2 * size_bytes, LEAST_SET_BYTES))
    pairs = [tuple(tvm.runtime.tensor(np.ones(size_bytes, "uint8")) for _ in range(2)) for _ in range(sets)]
    return max(_copy_gb_s(_copy(size_bytes, count), pairs, size_bytes) for count in {1, threads})


def _copy_gb_s(run: Callable[..., None], pairs: list[tuple], size_bytes: int) -> float:
    times: list[float] = []
    end = time.perf_counter() + _COPY_SECONDS
    while len(times) < 2 * _RUNS or time.perf_counter() < end:
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


if __name__ == "__main__":
    sys.exit(main())
