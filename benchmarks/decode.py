"""Decoding and prefill of a Llama decoder with int4 weights, beside onnxruntime and OpenVINO.

    python benchmarks/decode.py [--target avx512_bf16] [--contexts 128,1024] [--prompt 128]
                                [--threads 1,2] [--merge]

All engines get one file, in which keys and values have their places in a cache. Each runs in a process of
its own, and they take turns in several rounds, of which the best median counts. A step reads one token
behind CONTEXT others, prefill is the time of a prompt, no longer than a context. onnxruntime has past and
present bound to the same memory. `int8` has accuracy_level 4, `exact` 1; `bf16`, of targets that have it, is
`exact` with `--precision bf16`, an option of hybridc alone: its peers are those of `exact`. `difference` is
that of the prompt's last logits from onnxruntime's `exact` ones, as a share of them (root mean squares).
`memory` is no engine, but what as many threads read by OpenBLAS's dot products of an array of 256 MiB;
`read_share` is what a step has to read (all weights but the embedding, and keys and values of the tokens
before it) over its time, as a share of that. An engine that does not take the file has its error instead.
Results go to benchmarks/results/decode_TARGET.json; `--merge` leaves rows of other contexts, prompts and
numbers of threads there. The target is what `native` stands for, unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from common import result_rows, write_result

from hybridc import models
from hybridc.targets import ISAS, native_isa

ROUNDS = 3
MEMORY, MEMORY_BYTES = "memory", 256 << 20
ROOM = 32
"""Positions of the cache behind the context; engines attend to what is filled, or to all of it."""
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 256, "layers": 2, "heads": 8, "feed_forward": 704, "vocabulary": 2000},
    "small": {"hidden": 1024, "layers": 16, "heads": 16, "feed_forward": 2816, "vocabulary": 32000},
}
"""`small` has 246 million parameters, of which a token reads all but the embedding, 213 million."""

Step = Callable[[int, int], np.ndarray]
"""Reads so many tokens behind so many others, and gives logits."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=native_isa().name)
    parser.add_argument("--contexts", default="128,1024")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        engine, path, context, threads = arguments.worker
        if engine == MEMORY:
            found = {"read_gb_s": _read_gb_s(int(threads), arguments.seconds)}
        else:
            step = ENGINES[engine](Path(path), int(context), int(threads))
            found = _measured(step, int(context), arguments.prompt, arguments.seconds)
        print(json.dumps(found))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for context in map(int, arguments.contexts.split(",")):
            files = _files(Path(folder), context, arguments)
            for threads in map(int, arguments.threads.split(",")):
                rows += _rows(files, context, threads, arguments)
    name = f"decode_{arguments.target}"
    measured = set(map(_point, rows))
    kept = [row for row in (result_rows(name) if arguments.merge else []) if _point(row) not in measured]
    rows = sorted([*kept, *rows], key=_point)
    path = write_result(name, rows)
    print(f"written to {path}")
    return 0


def _point(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["context"], row["prompt"], row["threads"]


def _files(folder: Path, context: int, arguments: argparse.Namespace) -> dict[tuple[str, str], Path]:
    """By engine and arithmetic, what it loads."""
    import hybridc

    files: dict[tuple[str, str], Path] = {}
    for arithmetic in ("int8", "exact", *(("bf16",) if ISAS[arguments.target].has_bf16 else ())):
        model = folder / f"{arithmetic}_{context}.onnx"
        settings: dict[str, Any] = {**SIZES[arguments.size], "context": context + ROOM}
        settings["int8_activations"] = arithmetic == "int8"
        models.export("llama", model, **settings)
        artifact = model.with_suffix(".hyb")
        hybridc.compile(
            model,
            artifact,
            target=arguments.target,
            dims={"sequence": [1, arguments.prompt]},
            precision="bf16" if arithmetic == "bf16" else "fp32",
        )
        if arithmetic != "bf16":
            files |= {(name, arithmetic): model for name in ("onnxruntime", "openvino")}
        files["hybridc", arithmetic] = artifact
    return files


def _rows(
    files: dict[tuple[str, str], Path], context: int, threads: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in files}
    read: list[float] = []
    for _ in range(arguments.rounds):
        for (engine, arithmetic), path in files.items():
            found[engine, arithmetic].append(_worker(engine, path, context, threads, arguments))
        read.append(_worker(MEMORY, "", context, threads, arguments)["read_gb_s"])
    print({"threads": threads, "read_gb_s": max(read)}, flush=True)
    point = {"context": context, "prompt": arguments.prompt, "threads": threads}
    rows: list[dict[str, Any]] = [{"engine": MEMORY, **point, "read_gb_s": max(read)}]
    step_bytes = _step_bytes(files["onnxruntime", "exact"], context)
    reference = np.array(found["onnxruntime", "exact"][0].get("logits", [np.nan]))
    for (engine, arithmetic), rounds in found.items():
        row: dict[str, Any] = {"engine": engine, "arithmetic": arithmetic, **point}
        row |= {"size": arguments.size, "target": arguments.target}
        failed: dict[str, Any] | None = next((each for each in rounds if "error" in each), None)
        if failed is not None:
            row |= failed
        else:
            row |= {name: min(each[name] for each in rounds) for name in ("decode_ms", "prefill_ms")}
            off = np.array(rounds[0]["logits"]) - reference
            row |= {
                "difference": float(np.sqrt(np.mean(off**2) / np.mean(reference**2))),
                "read_share": step_bytes / row["decode_ms"] / 1e6 / max(read),
                "decode_tokens_per_s": 1e3 / row["decode_ms"],
                "prefill_tokens_per_s": arguments.prompt * 1e3 / row["prefill_ms"],
            }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def _worker(
    engine: str, path: str | Path, context: int, threads: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """What a process prints that measures one engine, or its error."""
    words = [sys.executable, __file__, "--seconds", str(arguments.seconds)]
    words += ["--prompt", str(arguments.prompt), "--worker", engine, str(path)]
    environment = os.environ | ({"OPENBLAS_NUM_THREADS": "1"} if engine == MEMORY else {})
    done = subprocess.run(
        [*words, str(context), str(threads)], capture_output=True, text=True, check=False, env=environment
    )
    error = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return json.loads(done.stdout) if done.returncode == 0 else {"error": error}


def _step_bytes(model: Path, context: int) -> int:
    """Of weights but the embedding, and of keys and values of the tokens before."""
    graph = onnx.load(model, load_external_data=False).graph
    embeddings = {node.input[0] for node in graph.node if node.op_type in ("Gather", "GatherBlockQuantized")}
    items = {weight.name: _nbytes(weight) for weight in graph.initializer}
    pasts = (i.type.tensor_type.shape.dim for i in graph.input if i.name.startswith("past"))
    cached = sum(4 * dim[1].dim_value * dim[3].dim_value * context for dim in pasts)
    return sum(count for name, count in items.items() if name not in embeddings) + cached


def _nbytes(weight: onnx.TensorProto) -> int:
    return math.prod(weight.dims) * onnx.helper.tensor_dtype_to_np_dtype(weight.data_type).itemsize


def _read_gb_s(threads: int, seconds: float) -> float:
    """The best of several reads of one array by as many threads."""
    parts = np.array_split(np.ones(MEMORY_BYTES // 4, np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        ms, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            list(pool.map(lambda part: np.dot(part, part), parts))
            ms = min(ms, (time.perf_counter() - start) * 1e3)
    return MEMORY_BYTES / ms / 1e6


def _measured(step: Step, context: int, prompt: int, seconds: float) -> dict[str, Any]:
    """Medians of a worker's runs, and the logits behind the prompt."""
    logits = step(0, prompt)
    logits = logits.reshape(-1, logits.shape[-1])[-1]
    return {
        "logits": [round(float(x), 6) for x in logits],
        "decode_ms": _median_ms(lambda: step(context, 1), seconds),
        "prefill_ms": _median_ms(lambda: step(0, prompt), seconds),
    }


def _median_ms(run: Callable[[], object], seconds: float) -> float:
    for _ in range(2):
        run()
    times, end = list[float](), time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _ids(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(1, 2000, (1, count))


def _feeds(before: int, count: int, room: int) -> dict[str, np.ndarray]:
    return {
        "input_ids": _ids(count),
        "attention_mask": (np.arange(room) < before + count).astype(np.int64)[None],
    }


def _hybridc(path: Path, context: int, threads: int) -> Step:
    from hybridc import load_generation

    session = load_generation(path, threads=threads)

    def step(before: int, count: int) -> np.ndarray:
        (read,) = session.sequences
        if len(read) < before:  # in the first step behind a context
            session.append(_ids(before)[:, len(read) :].tolist())
        session.rewind(before)
        return session.append(_ids(count).tolist())

    return step


def _onnxruntime(path: Path, context: int, threads: int) -> Step:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    pasts = {i.name: i.shape for i in session.get_inputs() if i.name.startswith("past")}
    random = np.random.default_rng(0)
    cache = {
        name: ort.OrtValue.ortvalue_from_numpy(random.standard_normal(shape).astype(np.float32) * 0.1)
        for name, shape in pasts.items()
    }

    def step(before: int, count: int) -> np.ndarray:
        binding = session.io_binding()
        for name, array in _feeds(before, count, context + ROOM).items():
            binding.bind_cpu_input(name, array)
        for name, value in cache.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()

    return step


def _openvino(path: Path, context: int, threads: int) -> Step:
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = ov.Core().compile_model(str(path), "CPU", settings).create_infer_request()
    random = np.random.default_rng(0)
    cache = {
        port.any_name: random.standard_normal([d.get_length() for d in port.partial_shape]).astype("f4") * 0.1
        for port in request.model_inputs
        if port.any_name.startswith("past")
    }

    def step(before: int, count: int) -> np.ndarray:
        found = request.infer({**_feeds(before, count, context + ROOM), **cache}, share_inputs=True)
        return found["logits"]

    return step


ENGINES: dict[str, Callable[[Path, int, int], Step]] = {
    "hybridc": _hybridc,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}

if __name__ == "__main__":
    sys.exit(main())
