"""Edited artifacts: each is refused, or computes what its own plan and manifest say.

Edits of plan.json and manifest.json come with hashes that fit; changed bytes of any file do not. Kernels of
the models here are known by name, so that numpy says what an edited graph computes.

python -m tests.fuzz.artifacts --minutes 20 --seed 1
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from hybridc import emulator
from hybridc.artifact import Artifact
from hybridc.ir.plan import Run
from hybridc.json_values import sealed
from hybridc.runtime import Session
from tests.fuzz.driver import Harness, Outcome, Verdict, main
from tests.support.artifacts import Model, cpu_model, hybrid_model, model_for_two_budgets, streaming_model
from tests.support.file_edits import damaged, edited

GPU_BYTES = 1 << 20
TOLERANCE = 1e-5
MANIFEST, PLAN = "manifest.json", "plan.json"

MODELS: dict[str, Callable[[], Model]] = {
    "cpu": cpu_model,
    "hybrid": hybrid_model,
    "streaming": streaming_model,
    "two budgets": model_for_two_budgets,
}
FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "matmul": lambda a, b: a @ b,
    "relu": lambda x: np.maximum(x, 0),
    "add": lambda a, b: a + b,
    "negate": lambda x: -x,
}


@cache
def files_of(name: str) -> dict[str, bytes]:
    """The files of a model's artifact, by name."""
    with tempfile.TemporaryDirectory(prefix="hybridc-fuzz-") as folder:
        path = MODELS[name]().write(Path(folder) / "model.hyb")
        return {file.name: file.read_bytes() for file in path.iterdir()}


def check(random: Random, folder: Path) -> Verdict:
    """An edited artifact is loaded and run, on a GPU that guards every tensor."""
    if not emulator.is_active():
        emulator.start(GPU_BYTES, guard_tensors=True)
    whole = files_of(random.choice(list(MODELS)))
    files = dict(whole)
    kind = random.random()
    if kind < 0.45:
        _put_plan(files, edited(json.loads(files[PLAN]), random))
    elif kind < 0.8:
        _put_manifest(files, edited(json.loads(files[MANIFEST]), random))
    elif kind < 0.85:
        _put_plan(files, edited(json.loads(files[PLAN]), random))
        _put_manifest(files, edited(json.loads(files[MANIFEST]), random))
    else:
        name = random.choice([name for name, data in files.items() if data])
        files[name] = damaged(files[name], random)
    path = folder / "model.hyb"
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return _run(path, files, json.loads(whole[MANIFEST]))


def _put_plan(files: dict[str, bytes], data: Any) -> None:
    files[PLAN] = json.dumps(data).encode()
    manifest = json.loads(files[MANIFEST])
    (entry,) = (file for file in manifest["files"] if file["name"] == PLAN)
    entry.update(size_bytes=len(files[PLAN]), sha256=hashlib.sha256(files[PLAN]).hexdigest())
    _put_manifest(files, manifest)


def _put_manifest(files: dict[str, bytes], data: Any) -> None:
    files[MANIFEST] = json.dumps(sealed(data) if isinstance(data, dict) else data).encode()


def _run(path: Path, files: dict[str, bytes], manifest: Any) -> Verdict:
    with Session(path, threads=1) as session:
        random, ports = np.random.default_rng(0), session.artifact.manifest.inputs
        feeds = {p.name: random.standard_normal(p.shape).astype(p.dtype) for p in ports}
        for _ in range(2):  # what the first run leaves behind must not matter
            results = session.run(None, feeds)
            expected = _computed(session.artifact, files, manifest, list(feeds.values()))
            for result, wanted in zip(results, expected, strict=True):
                if result.shape != wanted.shape or not np.allclose(
                    result, wanted, rtol=TOLERANCE, atol=TOLERANCE
                ):
                    return Verdict(Outcome.WRONG, f"{result.tolist()} instead of {wanted.tolist()}")
    return Verdict(Outcome.RIGHT)


def _computed(
    artifact: Artifact, files: dict[str, bytes], compiled: Any, feeds: list[np.ndarray]
) -> list[np.ndarray]:
    """What the graph says, in double precision, with the weights that the manifest says.

    A tensor may have another shape than the parameter, of the manifest as `compiled`, that it is passed as.
    Which stored weight a kernel gets is for the manifest to say, in what form it reads it is in the code.
    """
    graph, stored = artifact.graph, artifact.stored_plan
    values = {name: feed.astype(np.float64) for name, feed in zip(graph.inputs, feeds, strict=True)}
    stored_as: dict[tuple[str, int], np.ndarray] = {}  # a weight may be stored plain and packed
    for weight in (*stored.host_weights, *stored.streamed_weights, *stored.gpu_weights):
        data = files["weights.bin"][weight.offset_bytes : weight.offset_bytes + weight.size_bytes]
        array = np.frombuffer(data, weight.dtype).reshape(weight.shape).astype(np.float64)
        stored_as[weight.tensor, weight.layout] = array
        values[weight.tensor] = array.T if weight.layout else array
    device_of = {step.kernel: step.device for step in artifact.plan.steps if isinstance(step, Run)}
    waiting = list(graph.kernels)  # an edit may have exchanged kernels in this list; their steps are in order
    while waiting:
        kernel = next(k for k in waiting if values.keys() >= set(k.inputs))
        waiting.remove(kernel)
        code = (kernel.function, device_of[kernel.name])
        parameters = next(f["parameters"] for f in compiled["functions"] if (f["name"], f["device"]) == code)
        passed = artifact.manifest.signatures[code]
        arrays = [
            _read_as(stored_as[n, q.layout], p) if (n, q.layout) in stored_as else _seen_as(values[n], p)
            for n, p, q in zip(kernel.inputs, parameters, passed, strict=False)
        ]
        values[kernel.outputs[0]] = FUNCTIONS[kernel.function](*arrays)
    ports = artifact.manifest.outputs
    return [values[name].reshape(port.shape) for name, port in zip(graph.outputs, ports, strict=True)]


def _read_as(stored: np.ndarray, parameter: Any) -> np.ndarray:
    array = stored.reshape(-1)[: math.prod(parameter["shape"])].reshape(parameter["shape"])
    return array.T if parameter["layout"] else array


def _seen_as(array: np.ndarray, parameter: Any) -> np.ndarray:
    shape = parameter["shape"][::-1] if parameter["layout"] else parameter["shape"]  # packed is transposed
    return array.reshape(-1)[: math.prod(shape)].reshape(shape)


HARNESS = Harness("artifacts", check, seconds=30)

if __name__ == "__main__":
    raise SystemExit(main(HARNESS))
