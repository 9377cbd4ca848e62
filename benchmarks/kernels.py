"""Every distinct kernel of a model by itself, against what the machine can do at most.

    python benchmarks/kernels.py MODEL.onnx --isa avx512 --threads 2

Prints one JSON object a kernel. A call finds none of its arguments in a cache; times are medians. Right
beside each kernel the peak of multiply-adds and the bandwidth of a copy that moves as many bytes are
measured. A kernel is bound by what would take longer at these limits: compute, or memory.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from peak import copy_gb_s, peak_gflops
from tvm import s_tir, tirx

from hybridc.compiler import import_model
from hybridc.ir import Device
from hybridc.options import CompileOptions
from hybridc.passes.pipeline import run_stages
from hybridc.progress import Silent
from hybridc.targets import Target, parse_target
from hybridc.tuning.measure import Arguments, Kernel, call_times_ms, use_threads

_KERNEL_SECONDS = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--isa", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for row in kernel_rows(arguments.model, parse_target(arguments.isa), arguments.threads):
        print(json.dumps(row), flush=True)


def kernel_rows(model: Path, target: Target, threads: int) -> Iterator[dict[str, Any]]:
    """One row for each distinct kernel of the model's graph, in the order of the graph."""
    options = CompileOptions(target=target, threads=threads)
    done = run_stages(import_model(model, options)[1], Silent(), stop_after="graph")
    assert done.graph is not None and done.scheduled is not None
    use_threads(threads)
    calls = Counter(kernel.function for kernel in done.graph.kernels)
    flops = {kernel.function: kernel.flops for kernel in done.graph.kernels}
    for name, count in calls.items():
        scheduled = done.scheduled[name, Device.CPU]
        function = done.program.module[name]
        moved_bytes = bytes_moved(function)
        copy = copy_gb_s(max(moved_bytes // 2, 1), threads)
        kernel = Kernel(
            scheduled, target.isa, Arguments(scheduled, index_limit=min(_shapes(function)[0], default=1))
        )
        before = peak_gflops(target.isa, threads)
        [times] = call_times_ms([kernel], _KERNEL_SECONDS)
        ms = statistics.median(times)
        peak = max(before, peak_gflops(target.isa, threads))
        gflops, gb_s = flops[name] / ms / 1e6, moved_bytes / ms / 1e6
        yield {
            "kernel": name,
            "rule": scheduled.rule,
            "shape": " ".join("x".join(map(str, shape)) for shape in _shapes(function)),
            "calls": count,
            "ms": round(ms, 4),
            "total_ms": round(ms * count, 3),
            "bound": "compute" if flops[name] / peak > moved_bytes / copy else "memory",
            "gflops": round(gflops, 1),
            "percent_of_peak": round(100 * gflops / peak, 1),
            "gb_s": round(gb_s, 1),
            "percent_of_copy": round(100 * gb_s / copy, 1),
            "peak_gflops": round(peak, 1),
            "copy_gb_s": round(copy, 1),
        }


def bytes_moved(function: tirx.PrimFunc) -> int:
    """Bytes of all parameters once. Without a reduction no input is read at more points than there are
    outputs, so of a larger one (a table to gather from) only as many elements count."""
    shapes, dtypes = _shapes(function), [str(p.dtype) for p in function.params]
    limit = math.inf if _reduces(function) else max(math.prod(shapes[-1]), 1)
    return sum(
        int(min(math.prod(shape), limit)) * np.dtype(dtype).itemsize
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def _reduces(function: tirx.PrimFunc) -> bool:
    found: list[tirx.IterVar] = []

    def collect(block: s_tir.SBlock) -> None:
        found.extend(v for v in block.iter_vars if v.iter_type == tirx.IterVar.CommReduce)

    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, collect))
    return bool(found)


def _shapes(function: tirx.PrimFunc) -> list[tuple[int, ...]]:
    return [tuple(int(e) for e in parameter.shape) for parameter in function.params]


if __name__ == "__main__":
    main()
