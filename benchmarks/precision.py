"""bf16 on the CPU: time against fp32 and other engines, errors, and how often the same class is first.

    python benchmarks/precision.py [--target native] [--models resnet50,bert] [--inputs 1000] [--rounds 3]

Every engine runs in a process of its own, one after the other; rounds of all engines alternate, figures are
medians over all rounds. The error of bf16 is the norm of what changes in the outputs over that of the outputs
in fp32. Agreement is counted on onnx's light resnet50, whose weights are re-drawn and calibrated so that
activations stay near one, over random images: how often fp32 and bf16 put the same class first, as it is, and
after the mean of each class over all images was taken off, which leaves only what differs between images, and
is harder. Let nothing else run on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from common import suite_feeds, suite_model, write_result

import hybridc
from hybridc import models
from hybridc.results import Compiled
from hybridc.targets import available_threads, parse_target

SUITE: dict[str, dict[str, Any]] = {
    "resnet50": {},
    "bert": {"tokens": 128},
    "vit_b16": {},
    "atacworks": {},
}
ENGINES = ("fp32", "bf16", "onnxruntime", "openvino", "openvino_bf16")
FOLDER = Path(__file__).parent
GRIDS = (2, 4, 8, 16, 32)
"""Squares across a random image, from coarse to fine."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="native")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SUITE), metavar="A,B")
    parser.add_argument(
        "--inputs", type=int, default=1000, help="images that agreement is counted over; 0: not at all"
    )
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one engine in one round")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = [{"table": "missing", "engine": engine} for engine in missing_peers()]
    for name in arguments.models:
        with tempfile.TemporaryDirectory(prefix="hybridc-bench-") as folder:
            rows.append(model_row(name, Path(folder), arguments))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.inputs:
        with tempfile.TemporaryDirectory(prefix="hybridc-bench-") as folder:
            rows.append(agreement_row(Path(folder), arguments))
            print(json.dumps(rows[-1]), flush=True)
    print("written to", write_result(f"precision_{parse_target(arguments.target).isa.name}", rows))
    return 0


def missing_peers() -> tuple[str, ...]:
    """Engines that are not installed: they are left out."""
    return tuple(e for e in ENGINES[2:] if importlib.util.find_spec(e.removesuffix("_bf16")) is None)


def model_row(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Median milliseconds of each engine, and the error of bf16."""
    model = models.build(name, **SUITE[name])
    feeds = suite_feeds(model)
    np.savez(folder / "feeds.npz", **feeds)
    onnx.save(model, folder / "model.onnx")
    compiled = _compile(model, folder, arguments)
    outputs = {precision: _run_once(folder / f"{precision}.hyb", feeds) for precision in ("fp32", "bf16")}
    engines = [engine for engine in ENGINES if engine not in missing_peers()]
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    for _ in range(arguments.rounds):
        for engine, measured in times.items():
            measured += _times_ms(engine, folder, arguments)
    ms = {engine: statistics.median(measured) for engine, measured in times.items()}
    return {
        "table": "models",
        "model": name,
        "ms": {engine: round(value, 3) for engine, value in ms.items()},
        "faster_than_fp32": round(ms["fp32"] / ms["bf16"], 3),
        "ratios": {engine: round(ms[engine] / ms["bf16"], 3) for engine in engines},
        "relative_error": _relative_error(outputs["bf16"], outputs["fp32"]),
        "kernels": _kernels(compiled),
    }


def agreement_row(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """How often both precisions put the same class first."""
    model = suite_model("resnet50")
    _compile(model, folder, arguments)
    (port,) = suite_feeds(model).items()
    sessions = [hybridc.load(folder / f"{precision}.hyb") for precision in ("fp32", "bf16")]
    feeds = [{port[0]: random_image(port[1].shape, seed)} for seed in range(arguments.inputs)]
    scores = [np.log([session.run(None, feed)[0].reshape(-1) for feed in feeds]) for session in sessions]
    first = [s.argmax(axis=1) for s in scores]
    centred = [(s - scores[0].mean(axis=0)).argmax(axis=1) for s in scores]
    return {
        "table": "agreement",
        "model": "light resnet50",
        "inputs": arguments.inputs,
        "first_classes": len(set(first[0].tolist())),
        "first_classes_without_means": len(set(centred[0].tolist())),
        "same_first_class": float(np.mean(first[0] == first[1])),
        "same_first_class_without_means": float(np.mean(centred[0] == centred[1])),
        "error_over_spread": float(
            (scores[1] - scores[0]).std() / (scores[0] - scores[0].mean(axis=0)).std()
        ),
    }


def random_image(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random squares of several sizes: like photographs, and unlike noise, images differ from each other."""
    random, size = np.random.default_rng(seed), shape[-1]
    image = np.zeros(shape, np.float32)
    for squares in GRIDS:
        values = random.standard_normal((*shape[:2], squares, squares)).astype(np.float32)
        side = -(-size // squares)
        spread = values.repeat(side, axis=2).repeat(side, axis=3)[:, :, :size, :size]
        image += spread * random.uniform(0, 1)
    return image


def _compile(model: onnx.ModelProto, folder: Path, arguments: argparse.Namespace) -> Compiled:
    for precision in ("fp32", "bf16"):
        compiled = hybridc.compile(
            model,
            folder / f"{precision}.hyb",
            target=arguments.target,
            precision=precision,
            threads=arguments.threads,
        )
    return compiled


def _kernels(compiled: Compiled) -> dict[str, int]:
    """Kernels in bf16, and those that stayed in fp32 by the reason."""
    counts: dict[str, int] = {}
    for kernel in compiled.graphs[-1].kernels:
        label = kernel.precision_note or kernel.precision
        if kernel.precision_note or kernel.precision != "fp32":
            counts[label] = counts.get(label, 0) + 1
    return counts


def _run_once(artifact: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    with hybridc.load(artifact) as session:
        return [output.copy() for output in session.run(None, feeds)]


def _relative_error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.linalg.norm(f - e) / np.linalg.norm(e)) for f, e in zip(found, expected, strict=True))


def _times_ms(engine: str, folder: Path, arguments: argparse.Namespace) -> list[float]:
    own = engine in ("fp32", "bf16")
    model = folder / (f"{engine}.hyb" if own else "model.onnx")
    command = [FOLDER / "engines.py", "hybridc" if own else engine, model, folder / "feeds.npz"]
    options = ["--threads", arguments.threads, "--seconds", arguments.seconds]
    done = subprocess.run(
        [sys.executable, *map(str, [*command, *options])], stdout=subprocess.PIPE, text=True, check=True
    )
    return list(json.loads(done.stdout))


if __name__ == "__main__":
    sys.exit(main())
