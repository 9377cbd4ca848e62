"""One engine in a process of its own: run a model, and say how long it took.

    python benchmarks/engines.py ENGINE MODEL FEEDS.npz --threads 2 [--seconds 1.5] [--outputs OUTPUTS.npz]

ENGINE is `hybridc` or `hybridc_beside` (MODEL an artifact, for a CPU or for one beside a GPU, which is
emulated and runs nothing), `onnxruntime`, `openvino` or `openvino_bf16` (MODEL an ONNX file),
each configured for the least time of one run at a time, in float32 but for `openvino_bf16`, or `reference`:
onnxruntime whose products of 8-bit integers are exact on every processor. All get numpy arrays and
give numpy arrays. Prints the milliseconds of every run as a JSON list, warm-up not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

Feeds = dict[str, np.ndarray]
Run = Callable[[], Sequence[np.ndarray]]

WARM_UP_RUNS, WARM_UP_SECONDS = 3, 0.3
LEAST_RUNS = 5
GPU_MEMORY = "1MiB"
"""Of the GPU beside which the CPU runs all kernels."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("feeds", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--outputs", type=Path, help="write the outputs of one run here, and time nothing")
    arguments = parser.parse_args()
    with np.load(arguments.feeds) as stored:
        feeds = dict(stored)
    run = ENGINES[arguments.engine](arguments.model, feeds, arguments.threads)
    if arguments.outputs:
        np.savez(arguments.outputs, *run())
    else:
        print(json.dumps(times_ms(run, arguments.seconds)))


def times_ms(run: Run, seconds: float) -> list[float]:
    """Milliseconds of each run of at least `seconds`, and of at least a few runs."""
    _repeat(run, WARM_UP_SECONDS, WARM_UP_RUNS)
    return _repeat(run, seconds, LEAST_RUNS)


def _repeat(run: Run, seconds: float, least: int) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def hybridc(artifact: Path, feeds: Feeds, threads: int) -> Run:
    from hybridc.runtime import load

    session = load(artifact, threads=threads)
    return lambda: session.run(None, feeds)


def hybridc_beside(artifact: Path, feeds: Feeds, threads: int) -> Run:
    from hybridc import load

    session = load(artifact, threads=threads, emulate_gpu=GPU_MEMORY)
    return lambda: session.run(None, feeds)


def onnxruntime(model: Path, feeds: Feeds, threads: int, settings: Sequence[tuple[str, str]] = ()) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    for setting in settings:
        options.add_session_config_entry(*setting)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def reference(model: Path, feeds: Feeds, threads: int) -> Run:
    """Slower where the processor has no VNNI, so it is not what a peer is timed with."""
    from hybridc.cli.support.reference import EXACT_INTEGERS

    return onnxruntime(model, feeds, threads, (EXACT_INTEGERS,))


def openvino(model: Path, feeds: Feeds, threads: int, precision: str = "f32") -> Run:
    """Held to AVX2 where the environment has `ONEDNN_MAX_CPU_ISA=AVX2`."""
    import openvino as ov

    properties = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
    }
    compiled = ov.Core().compile_model(model, "CPU", properties)
    return lambda: list(compiled(feeds).values())


ENGINES: dict[str, Callable[[Path, Feeds, int], Run]] = {
    "hybridc": hybridc,
    "hybridc_beside": hybridc_beside,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "openvino_bf16": partial(openvino, precision="bf16"),
    "reference": reference,
}

if __name__ == "__main__":
    main()
