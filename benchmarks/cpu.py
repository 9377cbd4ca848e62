"""CPU code against onnxruntime and OpenVINO, whole networks and kernel by kernel.

    python benchmarks/cpu.py [--isa amx|avx512|avx2] [--models resnet50,bert] [--threads 2] [--rounds 3]
                             [--kernels resnet50 | --skip-kernels] [--busy 2]
    python benchmarks/cpu.py --drawn networks|recurrent|attention|speech|depthwise|quantized|operators
                             [--count 8] [--seed 0]
    python benchmarks/cpu.py --beside-gpu [...]

Each engine runs in a process of its own, one after the other, so that neither spinning threads nor memory of
one disturb another; rounds of all engines alternate, figures are medians over all rounds. Before a model is
timed, the outputs of all engines have to agree. The peers are onnxruntime and OpenVINO, and the faster one
counts. For the target avx2 OpenVINO is held to AVX2, which onnxruntime cannot be: it is a peer there only on
a processor without AVX-512. Drawn networks are of random sizes, or those of timm (`drawn/`); int8 ones are
compiled for AVX-512's VNNI instructions with `--isa avx512`. Let nothing else run meanwhile: with `--busy`
so many processes compute meanwhile, as other programs of a user would. With `--beside-gpu` what runs is the
CPU part of a target that has a GPU, where all kernels are pinned to the CPU, and a CPU alone is timed, too:
tensors are plain there, since either device may read them. Exits with 1 if outputs disagree or an
engine fails; such a model is left out.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from common import suite_feeds, write_result
from drawn import FAMILIES, draw
from drawn.case import Case
from engines import GPU_MEMORY

from hybridc import models
from hybridc.targets import ISAS, available_threads, native_isa

SUITE: dict[str, dict[str, Any]] = {
    "resnet50": {},
    "mobilenet_v2": {},
    "vgg16": {},
    "unet": {"size": 256},
    "bert": {"tokens": 128},
    "vit_b16": {},
    "super_resolution": {"size": 128},
    "atacworks": {},
}
INSTRUCTION_SETS = ("avx2", "avx2_vnni", "avx512", "amx")
LIMITS = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx2_vnni": {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}
"""Environment that holds the peers to an instruction set."""
REFERENCE, REFERENCE_PEER = "reference", "onnxruntime"
"""What outputs are compared with, and the engine that it is with a setting: that one is not compared."""
FOLDER = Path(__file__).parent
GPU_TARGET = "cuda:sm_75"
"""Of one architecture, as code of the GPU does not run here."""


def main() -> int:
    arguments = _arguments()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for case in cases(arguments):
        try:
            rows += model_rows(case, arguments)
        except (subprocess.CalledProcessError, Disagreement) as error:
            failed.append(case.name)
            print(f"{case.name} failed: {error}", flush=True)
    if rows:
        rows += summary(rows)
        if arguments.drawn:
            rows.append({"table": "drawn", "family": arguments.drawn, "seed": arguments.seed})
        if arguments.busy:
            rows.append({"table": "busy", "processes": arguments.busy})
        if arguments.beside_gpu:
            rows.append({"table": "beside"})
        print(table(rows))
        suffix = f"_{arguments.drawn}" * bool(arguments.drawn) + "_busy" * bool(arguments.busy)
        suffix += "_beside" * arguments.beside_gpu
        print("written to", write_result(f"cpu_{arguments.isa}{suffix}", rows))
    return 1 if failed else 0


def cases(arguments: argparse.Namespace) -> list[Case]:
    """The networks asked for."""
    if arguments.drawn:
        return draw(arguments.drawn, arguments.count, arguments.seed)
    return [Case(name, partial(models.build, name, **SUITE[name])) for name in arguments.models]


def model_rows(case: Case, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model. Raises Disagreement, or CalledProcessError if an engine fails."""
    with tempfile.TemporaryDirectory(prefix="hybridc-bench-") as folder:
        bench = Bench(case, Path(folder), arguments.isa, arguments.threads, beside_gpu=arguments.beside_gpu)
        errors = bench.errors()
        if not all(error <= case.tolerance for error in errors.values()):
            raise Disagreement(f"outputs differ from those of {REFERENCE}: {errors}")
        with _busy(arguments.busy):
            row = bench.compare(arguments.rounds, arguments.seconds) | {"max_rel_errors": errors}
        print(json.dumps(row), flush=True)
        return [row, *(bench.kernels(arguments.rounds) if case.name in arguments.kernels else [])]


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """While it lasts, so many processes compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def peers(isa: str) -> tuple[str, ...]:
    """Engines that use no richer instruction set than `isa` on this processor."""
    # onnxruntime takes the richest one there is, and has no option for another; it does so in float32
    # between AVX2 and AVX-512, and in int8 between AVX-512 and AMX, where it is kept as a peer all the same.
    if native_isa().vector_bits > ISAS[isa].vector_bits:
        return ("openvino",)
    return "onnxruntime", "openvino"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    native = "avx2" if native_isa().vector_bits == ISAS["avx2"].vector_bits else "avx512"
    parser.add_argument("--isa", choices=INSTRUCTION_SETS, default=native)
    parser.add_argument("--models", type=_names, default=list(SUITE), metavar="A,B")
    parser.add_argument("--drawn", choices=FAMILIES, help="networks drawn at random, not those of the suite")
    parser.add_argument("--count", type=int, default=8, help="of drawn networks")
    parser.add_argument("--seed", type=int, default=0, help="of drawn networks")
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--beside-gpu", action="store_true", help="the CPU part of a target with a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one engine in one round")
    parser.add_argument("--kernels", type=_names, metavar="A,B", help="only the kernels of these models")
    parser.add_argument("--skip-kernels", action="store_true")
    arguments = parser.parse_args()
    if arguments.kernels is None:
        without = arguments.skip_kernels or arguments.drawn or arguments.busy or arguments.beside_gpu
        arguments.kernels = [] if without else arguments.models
    return arguments


def _names(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in SUITE]
    if unknown:
        raise argparse.ArgumentTypeError(f"not of the suite: {', '.join(unknown)}; it has {', '.join(SUITE)}")
    return text.split(",")


class Disagreement(Exception):
    """Outputs of two engines differ by more than rounding."""


class Bench:
    """One network, written and compiled into `folder`."""

    def __init__(self, case: Case, folder: Path, isa: str, threads: int, *, beside_gpu: bool = False) -> None:
        self.name, self.folder, self.isa, self.threads = case.name, folder, isa, threads
        model = case.build()
        self.model, self.feeds = folder / "model.onnx", folder / "feeds.npz"
        onnx.save(model, self.model)
        np.savez(self.feeds, **suite_feeds(model))
        target = case.targets.get(isa, isa)
        self.artifacts = {"hybridc": folder / "model.hyb"}
        self.compile_s = self._compile("hybridc", target)
        self.ours = "hybridc_beside" if beside_gpu else "hybridc"
        if beside_gpu:
            self.artifacts[self.ours] = folder / "beside.hyb"
            options = ("--gpu-memory", GPU_MEMORY, "--pin", "*=cpu", "--plan-seconds", 1)
            self.compile_s = self._compile(self.ours, f"{GPU_TARGET}+{target}", *options)

    def _compile(self, engine: str, target: str, *options: object) -> float:
        """Seconds that it took."""
        command = ("-m", "hybridc.cli", "compile", self.model, "-o", self.artifacts[engine])
        asked = ("--target", target, "--threads", self.threads, "--no-cache", "--json", *options)
        return float(sum(json.loads(_python(*command, *asked))["seconds"].values()))

    def errors(self) -> dict[str, float]:
        """Largest difference of each engine from the reference, as a fraction of the output's scale."""
        compared = [engine for engine in self._engines() if engine != REFERENCE_PEER]
        expected = self._outputs(REFERENCE)
        return {engine: _scaled_error(self._outputs(engine), expected) for engine in compared}

    def compare(self, rounds: int, seconds: float) -> dict[str, Any]:
        """Median milliseconds of each engine, and how many times longer the faster peer takes than we do."""
        times: dict[str, list[list[float]]] = {engine: [] for engine in self._engines()}
        for _ in range(rounds):
            for engine, measured in times.items():
                measured.append(json.loads(self._run(engine, "--seconds", seconds)))
        medians = {
            engine: statistics.median(ms for one_round in measured for ms in one_round)
            for engine, measured in times.items()
        }
        return {
            "table": "models",
            "model": self.name,
            "compile_s": round(self.compile_s, 2),
            "ms": {engine: round(ms, 3) for engine, ms in medians.items()},
            "round_ms": {
                engine: [round(statistics.median(r), 3) for r in measured]
                for engine, measured in times.items()
            },
            "ratio": round(min(medians[peer] for peer in peers(self.isa)) / medians[self.ours], 3),
        }

    def kernels(self, rounds: int) -> list[dict[str, Any]]:
        """Rows of every distinct kernel of the model."""
        options = ("--isa", self.isa, "--threads", self.threads, "--rounds", rounds)
        lines = _python(FOLDER / "kernels.py", self.model, *options).splitlines()
        return [{"table": "kernels", "model": self.name, **json.loads(line)} for line in lines]

    def _engines(self) -> tuple[str, ...]:
        return *self.artifacts, *peers(self.isa)

    def _outputs(self, engine: str) -> list[np.ndarray]:
        path = self.folder / f"{engine}.npz"
        self._run(engine, "--outputs", path)
        with np.load(path) as stored:
            return [stored[name] for name in stored]

    def _run(self, engine: str, *options: object) -> str:
        model = self.artifacts.get(engine, self.model)
        command = (FOLDER / "engines.py", engine, model, self.feeds, "--threads", self.threads)
        return _python(*command, *options, environment=LIMITS[self.isa])


def _python(*command: object, environment: dict[str, str] | None = None) -> str:
    """What a fresh interpreter prints."""
    environment = {**os.environ, **(environment or {})}
    done = subprocess.run(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return done.stdout


def _scaled_error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """NaN where one of them has a NaN, which is no agreement either."""
    pairs = zip(found, expected, strict=True)
    return float(np.max([np.abs(f - e).max() / max(np.abs(e).max(), 1e-30) for f, e in pairs]))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean and worst of the ratios; median and least percentages of the kernels."""
    # one network may be drawn twice
    ratios = [(row["ratio"], row["model"]) for row in rows if row["table"] == "models"]
    worst, worst_model = min(ratios)
    lines: list[dict[str, Any]] = [
        {
            "table": "summary",
            "what": "peer's time over ours",
            "geometric_mean": round(math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios)), 3),
            "worst": worst,
            "worst_model": worst_model,
        }
    ]
    kernels = [row for row in rows if row["table"] == "kernels"]
    compute = [row for row in kernels if row["bound"] == "compute"]
    for name in dict.fromkeys(row["model"] for row in compute):
        of_model = [row for row in compute if row["model"] == name]
        lines.append(_percentages(f"compute-bound kernels of {name}", of_model, "percent_of_peak"))
    memory = [row for row in kernels if row["bound"] == "memory"]
    if memory:
        lines.append(_percentages("memory-bound kernels", memory, "percent_of_copy"))
    return lines


def _percentages(what: str, kernels: list[dict[str, Any]], field: str) -> dict[str, Any]:
    least = min(kernels, key=lambda row: row[field])
    return {
        "table": "summary",
        "what": what,
        "measure": field,
        "kernels": len(kernels),
        "median": round(statistics.median(row[field] for row in kernels), 1),
        "least": least[field],
        "least_kernel": f"{least['model']} {least['kernel']} {least['shape']}",
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = []
    width = max(len(row["model"]) for row in rows if row["table"] == "models")
    for row in rows:
        if row["table"] == "models":
            times = "  ".join(f"{engine} {ms:9.2f}" for engine, ms in row["ms"].items())
            lines.append(f"{row['model']:{width}} {times}  ratio {row['ratio']:.2f}")
    for row in sorted((r for r in rows if r["table"] == "kernels"), key=lambda r: -r["total_ms"]):
        limit = (
            f"{row['percent_of_peak']:5.1f} % of peak"
            if row["bound"] == "compute"
            else f"{row['percent_of_copy']:5.1f} % of copy"
        )
        lines.append(
            f"{row['model']:18} {row['total_ms']:8.3f} ms = {row['calls']:3} x {row['ms']:8.4f}"
            f"  {row['gflops']:6.1f} GFLOP/s {row['gb_s']:5.1f} GB/s {limit}"
            f"  [{row['rule']}] {row['kernel']} {row['shape']}"
        )
    lines += [json.dumps(row) for row in rows if row["table"] == "summary"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
