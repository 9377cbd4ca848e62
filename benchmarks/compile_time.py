"""How long compilations take, with and without what earlier ones left in the cache.

    python benchmarks/compile_time.py [MODEL ...]
    python benchmarks/compile_time.py --graphs 1000 2000 4000 [--seed 0]

Each compilation is a process of its own. Models have caches of their own, which begin with no more than what
g++ builds of the planner. Takes about ten minutes for all models on two cores. Exits with 1 if an artifact
differs from that of a compilation without the cache.

With `--graphs` it compiles networks of so many nodes instead, drawn at random from a seed, without the cache:
times of the parts and processor time should grow as the nodes do. Seconds and bytes are printed only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from common import write_result
from onnx import TensorProto, helper, numpy_helper

TARGET, BUDGET, OTHER_BUDGET = "cuda+avx2", "50%", "25%"
MODELS = ("lenet", "unet", "resnet50")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--graphs", nargs="+", type=int, metavar="NODES")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.graphs:
        for nodes in sorted(given.graphs):  # the largest process so far is that of the present graph
            print(measure_graph(nodes, given.seed), flush=True)
        return 0
    models = given.models
    rows = [row for name in models for row in measure(name)]
    if tuple(models) == MODELS:
        print("written to", write_result("compile_time", rows))
    return 0 if all(row["same_as_without_cache"] for row in rows) else 1


def measure(name: str) -> list[dict[str, Any]]:
    """A row for each kind of compilation of a model."""
    with tempfile.TemporaryDirectory(prefix="hybridc-compile-time-") as folder:
        place = Path(folder)
        hybridc(place, "models", "export", name, "model.onnx")
        hybridc(place, "plan", "model.onnx", "--target", TARGET, "--no-cache", "--quiet")
        reference: dict[str, str] = {}
        rows = []
        for kind, count, budget, words in (
            ("no cache", 1, BUDGET, ["--no-cache"]),
            ("cold", 1, BUDGET, []),
            ("warm", 1, BUDGET, []),
            ("other budget", 1, OTHER_BUDGET, []),
            ("two at once, warm", 2, BUDGET, []),
            ("two at once, cold", 2, BUDGET, []),
        ):
            if kind == "two at once, cold":
                os.rename(place / "cache" / "hybridc" / "compiled", place / "old")
            made = compile_at_once(place, count, budget, words)
            if budget == BUDGET:
                reference = reference or made[0]["digests"]
            same = budget != BUDGET or all(one.pop("digests") == reference for one in made)
            slowest = max(made, key=lambda one: one["process_s"])
            slowest.pop("digests", None)
            row = {"model": name, "target": TARGET, "budget": budget, "kind": kind, **slowest}
            rows.append(row | {"same_as_without_cache": same})
            print(rows[-1], flush=True)
    return rows


def measure_graph(nodes: int, seed: int) -> dict[str, Any]:
    """What one compilation of a random graph takes."""
    with tempfile.TemporaryDirectory(prefix="hybridc-compile-time-") as folder:
        place = Path(folder)
        onnx.save(random_diamonds(nodes, seed), place / "model.onnx")
        [made] = compile_at_once(place, 1, BUDGET, ["--no-cache"])
    largest_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    kept = {key: made[key] for key in ("cpu_s", "process_s", "seconds")}
    return {"nodes": nodes, "seed": seed, **kept, "largest_process_bytes": largest_bytes}


def random_diamonds(count: int, seed: int) -> onnx.ModelProto:
    """Four nodes each: a convolution or matrix product and a ReLU beside another one, added up."""
    random, rng = Random(seed), np.random.default_rng(seed)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def emit(operator: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, list(inputs), [f"v{len(nodes)}"], **attributes))
        return f"v{len(nodes) - 1}"

    def product(value: str) -> str:
        operator, shape = random.choice([("Conv", (4, 4, 3, 3)), ("MatMul", (8, 8))])
        factors = rng.standard_normal(shape).astype(np.float32) / 12
        weights.append(numpy_helper.from_array(factors, f"w{len(weights)}"))
        attributes = {"pads": [1, 1, 1, 1]} if operator == "Conv" else {}
        return emit(operator, value, weights[-1].name, **attributes)

    value = "x"
    while len(nodes) < count:
        value = emit("Add", emit("Relu", product(value)), product(value))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 4, 8, 8)) for name in ("x", value)]
    graph = helper.make_graph(nodes, "diamonds", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def compile_at_once(place: Path, count: int, budget: str, words: list[str]) -> list[dict[str, Any]]:
    """What `count` processes measure of the same compilation."""
    before, start = children_cpu_s(), time.perf_counter()
    artifacts = [place / f"{number}.hyb" for number in range(count)]
    processes = [
        start_hybridc(
            place,
            *("compile", "model.onnx", "-o", str(artifact), "--target", TARGET, "--gpu-memory", budget),
            *("--json", "--quiet", *words),
        )
        for artifact in artifacts
    ]
    made = []
    for process, artifact in zip(processes, artifacts, strict=True):
        output, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(process.returncode)
        report = json.loads(output)
        files = sorted(artifact.iterdir())
        made.append(
            {
                "process_s": round(time.perf_counter() - start, 2),
                "compile_s": round(sum(report["seconds"].values()), 2),
                "seconds": {part: round(seconds, 2) for part, seconds in report["seconds"].items()},
                "cache": report["cache"],
                "digests": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
            }
        )
    cpu_s = round((children_cpu_s() - before) / count, 2)
    return [one | {"cpu_s": cpu_s} for one in made]


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start_hybridc(place: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(place / "cache")}
    command = [sys.executable, "-m", "hybridc.cli", *words]
    return subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True)


def hybridc(place: Path, *words: str) -> None:
    process = start_hybridc(place, *words)
    process.communicate()
    if process.returncode != 0:
        raise SystemExit(process.returncode)


if __name__ == "__main__":
    sys.exit(main())
