"""Decoding and prefill of a Llama decoder with int4 weights, beside other engines.

    python benchmarks/decode.py [--target avx512_bf16] [--contexts 128,1024] [--prompt 128]
                                [--threads 1,2] [--merge]

onnxruntime, onnxruntime-genai (`genai`), OpenVINO and llama.cpp, as far as they are installed, beside
hybridc, in one arithmetic at a time: `int8` rounds activations to 8 bits (accuracy_level 4 in the file),
`exact` computes in float32 (accuracy_level 1), `bf16`, of targets that have it, rounds both factors to bf16.
OpenVINO is told so by its options, hybridc by `--precision bf16`; onnxruntime has no bf16, and stands in for
it with `exact`. llama.cpp always rounds to 8 bits; it gets the same codes as Q4_0, and those again as Q4_K_M.

Keys and values have their places in a cache. Each engine runs in a process of its own, and they take turns
in several rounds, of which the best median counts. A step reads one token behind CONTEXT others, prefill is
the time of a prompt, no longer than a context, with the logits of each token. onnxruntime has past and
present bound to the same memory. `difference` is that of the prompt's last logits from onnxruntime's `exact`
ones, as a share of them (root mean squares). `memory` is no engine, but what as many threads read by
OpenBLAS's dot products of an array of 256 MiB; `read_share` is what a step has to read (all weights but the
embedding, and keys and values of the tokens before it) over its time, as a share of that. An engine that does
not take the file has its error instead. Results go to benchmarks/results/decode_TARGET.json; `--merge` leaves
rows of other contexts, prompts and numbers of threads there. The target is what `native` stands for, unless
told otherwise. Peers that no extra installs: `pip install gguf llama-cpp-python onnxruntime-genai`.
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
from decode.engines import ENGINES, Step
from decode.files import decoder_files

from hybridc.targets import ISAS, native_isa

ROUNDS = 3
MEMORY, MEMORY_BYTES = "memory", 256 << 20
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 256, "layers": 2, "heads": 8, "feed_forward": 704, "vocabulary": 2000},
    "small": {"hidden": 1024, "layers": 16, "heads": 16, "feed_forward": 2816, "vocabulary": 32000},
}
"""`small` has 246 million parameters, of which a token reads all but the embedding, 213 million."""


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
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        engine, arithmetic, path, context, threads = arguments.worker
        if engine == MEMORY:
            found = {"read_gb_s": _read_gb_s(int(threads), arguments.seconds)}
        else:
            step = ENGINES[engine](Path(path), arithmetic, int(context), int(threads))
            found = _measured(step, int(context), arguments.prompt, arguments.seconds)
        print(json.dumps(found))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for context in map(int, arguments.contexts.split(",")):
            files = decoder_files(
                Path(folder),
                SIZES[arguments.size],
                context,
                arguments.prompt,
                arguments.target,
                ISAS[arguments.target].has_bf16,
            )
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


def _rows(
    files: dict[tuple[str, str], Path], context: int, threads: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in files}
    read: list[float] = []
    for _ in range(arguments.rounds):
        for (engine, arithmetic), path in files.items():
            found[engine, arithmetic].append(_worker((engine, arithmetic), path, context, threads, arguments))
        read.append(_worker((MEMORY, ""), "", context, threads, arguments)["read_gb_s"])
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
    of: tuple[str, str], path: str | Path, context: int, threads: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """What a process prints that measures one engine in one arithmetic, or its error."""
    words = [sys.executable, __file__, "--seconds", str(arguments.seconds)]
    words += ["--prompt", str(arguments.prompt), "--worker", *of, str(path)]
    environment = os.environ | ({"OPENBLAS_NUM_THREADS": "1"} if of[0] == MEMORY else {})
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


if __name__ == "__main__":
    sys.exit(main())
