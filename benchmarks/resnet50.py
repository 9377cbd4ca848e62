"""ResNet-50 on the CPU: seconds to compile, and a run against TVM's unscheduled pipeline and ONNX Runtime.

    python benchmarks/resnet50.py [--target avx512]

The three run one after the other, each warmed up, so that spinning thread pools do not disturb each other;
figures are medians. Exits with 1 if compiling takes more than 30 s or the run is less than 50 times faster
than the unscheduled pipeline.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import tvm
from common import suite_feeds, suite_model, write_result

from hybridc.compiler import compile_model
from hybridc.options import CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.lower.lower import llvm_target
from hybridc.runtime import load
from hybridc.targets import parse_target

COMPILE_LIMIT_S = 30.0
SPEEDUP = 50.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="avx512")
    options = CompileOptions(target=parse_target(parser.parse_args().target), cache=False)
    warnings.simplefilter("ignore")
    model = suite_model("resnet50")
    feeds = suite_feeds(model)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        compiled = compile_model(model, Path(folder) / "resnet50.hyb", options)
        compile_s = time.perf_counter() - start
        with load(Path(folder) / "resnet50.hyb") as session:
            ours_ms = median_ms(lambda: session.run(None, feeds), 30)
    ort_ms = median_ms(onnxruntime_run(model, feeds), 30)
    zero_ms = median_ms(zero_pipeline(model, options, feeds), 3)
    row: dict[str, Any] = {
        "model": "resnet50",
        "target": str(options.target),
        "compile_s": round(compile_s, 2),
        "compile_parts_s": {part: round(s, 2) for part, s in compiled.seconds.items()},
        "run_ms": round(ours_ms, 2),
        "onnxruntime_ms": round(ort_ms, 2),
        "tvm_unscheduled_ms": round(zero_ms, 1),
        "speedup_over_unscheduled": round(zero_ms / ours_ms, 1),
    }
    print(row)
    print("written to", write_result(f"resnet50_{options.target.isa.name}", [row]))
    return 0 if compile_s <= COMPILE_LIMIT_S and zero_ms / ours_ms >= SPEEDUP else 1


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call, after one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def onnxruntime_run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Callable[[], object]:
    """A run of the model by ONNX Runtime's CPU provider."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def zero_pipeline(
    model: onnx.ModelProto, options: CompileOptions, feeds: dict[str, np.ndarray]
) -> Callable[[], object]:
    """A run of the same imported model through `tvm.relax.get_pipeline("zero")`."""
    imported, _ = import_model(model, options)
    target = llvm_target(options.target.isa)
    with target:
        executable = tvm.compile(tvm.relax.get_pipeline("zero")(imported.module), target)
    machine = tvm.relax.VirtualMachine(executable, tvm.cpu())
    values = [feeds[v.name] for v in imported.inputs]
    weights = [np.ascontiguousarray(w) for w in imported.weights.values()]
    arguments = [tvm.runtime.tensor(a) for a in (*values, *weights)]
    return lambda: machine["main"](*arguments)


if __name__ == "__main__":
    sys.exit(main())
