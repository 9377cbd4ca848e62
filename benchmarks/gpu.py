"""Everything that only a real GPU can show, in less than ten minutes: `gpu_DEVICE.json`.

    python benchmarks/gpu.py [profile correctness memory kernels networks copies] [--models resnet50,bert]

profile      `hybridc machine calibrate`; plans are made with it, and with that of a data sheet to compare
correctness  outputs at each budget against ONNX Runtime on the CPU; losses of training against the CPU's
memory       what the driver says this process takes, against plan and budget
kernels      each distinct kernel against its prediction and against cuDNN or cuBLAS (gpu/kernels.py)
networks     times at each budget against the CPU alone and PyTorch: resident, offloaded, split (gpu/peers.py)
copies       how much of the copies ran beside kernels, and how long each lane took, by traced runs

Without names all of them. Needs an NVIDIA GPU and onnxruntime; PyTorch and torchvision for the peers, which
are left out without them. Every measurement is a process of its own with a time limit; one that fails is a
row that says so, and the exit code is 1 then. With `--emulate-gpu` everything runs on the emulated GPU, but
nothing is timed, nor written. Let nothing else run on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from common import suite_feeds, suite_model, write_result
from engines import onnxruntime
from gpu.process import Failure, Row, json_lines, json_of, python
from gpu.table import is_failure, table

from hybridc import models
from hybridc.runtime.libraries import available_threads
from hybridc.targets import native_isa

PARTS = ("profile", "correctness", "memory", "kernels", "networks", "copies")
SESSION_PARTS = {"correctness", "memory", "networks", "copies"}
SUITE: dict[str, tuple[str, dict[str, Any]]] = {
    "squeezenet": ("squeezenet", {}),
    "mobilenet_v2": ("mobilenet_v2", {}),
    "resnet50": ("resnet50", {}),
    "resnet50:16": ("resnet50", {"batch": 16}),
    "vgg16": ("vgg16", {}),
    "unet": ("unet", {"size": 256}),
    "bert": ("bert", {"tokens": 128}),
    "vit_b16": ("vit_b16", {}),
    "resnet50@fp16": ("resnet50", {}),
}
"""Behind an @ stands the precision, where it is not float32."""
LIGHT = ("squeezenet",)
"""Of onnx's own light models; the others are of `hybridc.models`."""
BUDGETS = "100%,75%,50%,25%,10%"
DATA_SHEET_BUDGETS = "100%,25%"
DETAILED = ("resnet50", "bert", "resnet50@fp16")
"""Models whose kernels are measured, that torch.compile is tried on, and that a data sheet plans too."""
TORCH = ("mobilenet_v2", "resnet50", "resnet50:16", "vgg16", "bert", "vit_b16", "resnet50@fp16")
TRAINING = ("cifar_quick", 32)
DATA_SHEET = "h100"
EMULATED_BYTES = 16 << 30
FOLDER = Path(__file__).parent


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="hybridc-bench-") as folder:
        bench = Bench(arguments.folder or Path(folder), arguments)
        for row in bench.rows():
            bench.done.append(row)
            print(json.dumps(row), flush=True)
            if not arguments.emulate_gpu:
                write_result(bench.name, bench.done)  # as far as it is: the next part may outrun a time limit
        print(table(bench.done))
        return 1 if any(map(is_failure, bench.done)) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), metavar="PART")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SUITE), metavar="A,B")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--isa", default=native_isa().name)
    parser.add_argument("--seconds", type=float, default=0.7, help="of one engine at one budget")
    parser.add_argument(
        "--machine", help=f"profile to plan with where the part `profile` is left out (default: {DATA_SHEET})"
    )
    parser.add_argument(
        "--jobs", type=int, default=max(available_threads() // 2, 1), help="compilations at once"
    )
    parser.add_argument("--folder", type=Path, help="keep models and artifacts here")
    parser.add_argument("--emulate-gpu", action="store_true")
    arguments = parser.parse_args()
    arguments.parts = arguments.parts or list(PARTS)
    return arguments


@dataclass(frozen=True, slots=True)
class Gpu:
    """What nvidia-smi says of the first GPU."""

    name: str
    driver: str
    architecture: str
    memory: str


def gpu(emulated: bool) -> Gpu:
    """Raises CalledProcessError or OSError without an NVIDIA driver."""
    if emulated:
        return Gpu("emulated", "none", "sm_90", f"{EMULATED_BYTES >> 20} MiB")
    query = "--query-gpu=name,driver_version,compute_cap,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    name, driver, capability, memory = answer.strip().split(", ")
    return Gpu(name, driver, f"sm_{capability.replace('.', '')}", memory)


class Bench:
    """One run of this benchmark, its models and artifacts in `folder`."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.arguments, self.parts = folder, arguments, set(arguments.parts)
        self.gpu = gpu(arguments.emulate_gpu)
        self.name = "gpu_" + re.sub(r"\W+", "_", self.gpu.name.removeprefix("NVIDIA ")).lower()
        self.cuda = f"cuda:{self.gpu.architecture}"
        is_measured = "profile" in self.parts and not arguments.emulate_gpu
        self.machine: str | None = arguments.machine or (None if is_measured else DATA_SHEET)
        self.done: list[Row] = []

    def rows(self) -> Iterator[Row]:
        """Rows of all parts, each as soon as it is known."""
        yield {"table": "machine", **{name: getattr(self.gpu, name) for name in Gpu.__slots__}}
        if "profile" in self.parts:
            yield self.profile()
        if self.parts & SESSION_PARTS:
            yield from self.sessions()
        if "correctness" in self.parts:
            yield from self.training()
        if "kernels" in self.parts:
            for name in self._chosen(DETAILED):
                self.model(name)
                yield from self.kernels(name)
        if "networks" in self.parts and not self.arguments.emulate_gpu:
            for name in self._chosen(TORCH):
                yield from self.torch(name)

    # ------------------------------------------------------------------------------------------ parts

    def profile(self) -> Row:
        """Calibrate, and plan with the result from now on. An emulated GPU has no speed to measure."""
        if self.arguments.emulate_gpu:
            return {"table": "profile", "skipped": "an emulated GPU has no speed"}
        path = self.folder / "measured.json"
        command = ["-m", "hybridc.cli", "machine", "calibrate", "-o", path]
        command += ["--target", f"{self.cuda}+{self.arguments.isa}", "--json"]
        row = json_of(python(*command, limit_s=180), {"table": "profile"})
        if not is_failure(row):
            self.machine = str(path)
        return row

    def sessions(self) -> Iterator[Row]:
        """Compile everything, side by side; then run every plan, one after the other."""
        start = time.perf_counter()
        chosen = self._chosen(tuple(SUITE))
        jobs = [(name, partial(self.compile, name)) for name in chosen]
        if "networks" in self.parts and not self.arguments.emulate_gpu:
            jobs += [(name, partial(self.compile_for_cpu, name)) for name in chosen]
        if "profile" in self.parts and self.machine not in (None, DATA_SHEET):
            jobs += [(name, partial(self.compile, name, DATA_SHEET)) for name in self._chosen(DETAILED)]
        for name in chosen:
            self.model(name)
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            compiled = list(pool.map(lambda job: job[1](), jobs))
        yield {"table": "compiled", "seconds": round(time.perf_counter() - start, 1)}
        for (name, _), row in zip(jobs, compiled, strict=True):
            if is_failure(row):
                yield row
            elif row["target"] == "cpu":
                yield self.cpu_time(name)
            else:
                for budget in row["budgets"]:
                    yield self.session(name, row["artifact"], row["machine"], budget)

    def session(self, name: str, artifact: str, machine: str, budget: int) -> Row:
        parts = sorted(self.parts & SESSION_PARTS)
        command = ["-m", "gpu.session", artifact, self._of(name), ",".join(parts)]
        command += ["--budget", budget, "--seconds", self.arguments.seconds, *self._emulation]
        return json_of(
            python(*command, limit_s=120 * self._patience),
            {"table": "sessions", "model": name, "machine": machine, "budget_bytes": budget},
        )

    def training(self) -> Iterator[Row]:
        name, batch = TRAINING
        batch = 2 if self.arguments.emulate_gpu else batch
        command = ["-m", "gpu.training_step", name, batch, "--cuda", self.cuda, "--isa", self.arguments.isa]
        command += [*(["--machine", self.machine] if self.machine else []), *self._emulation]
        yield from json_lines(
            python(*command, limit_s=180 * self._patience), {"table": "training", "model": name}
        )

    def kernels(self, name: str) -> Iterator[Row]:
        if not self.arguments.emulate_gpu and importlib.util.find_spec("torch") is None:
            yield {
                "table": "kernels",
                "model": name,
                "skipped": "PyTorch, which times them, is not installed",
            }
            return
        target = f"{self.cuda}+{self.arguments.isa}"
        command = ["-m", "gpu.kernels", self._of(name) / "model.onnx", "--target", target, *_precision(name)]
        command += [*(["--machine", self.machine] if self.machine else []), *self._emulation]
        yield from json_lines(
            python(*command, limit_s=180 * self._patience), {"table": "kernels", "model": name}
        )

    def torch(self, name: str) -> Iterator[Row]:
        if any(importlib.util.find_spec(package) is None for package in ("torch", "torchvision")):
            yield {"table": "torch", "model": name, "skipped": "PyTorch or torchvision is not installed"}
            return
        budgets = [r["budget_bytes"] for r in self.done if _is_measured(r, name)]
        network, options = SUITE[name]
        command = ["-m", "gpu.peers", network, "--batch", options.get("batch", 1)]
        command += ["--budgets", ",".join(map(str, sorted(set(budgets), reverse=True)))] if budgets else []
        command += ["--seconds", self.arguments.seconds, *(["--compile"] if name in DETAILED else [])]
        command += ["--half"] if _precision(name) else []
        yield from json_lines(python(*command, limit_s=150), {"table": "torch", "model": name})

    def cpu_time(self, name: str) -> Row:
        folder = self._of(name)
        command = [FOLDER / "engines.py", "hybridc", folder / "cpu.hyb", folder / "feeds.npz"]
        command += ["--threads", available_threads(), "--seconds", self.arguments.seconds]
        row: Row = {"table": "cpu", "model": name}
        ran = python(*command, limit_s=120)
        if isinstance(ran, Failure):
            return row | ran.row
        return row | {"ms": round(float(np.median(json.loads(ran))), 4)}

    # ---------------------------------------------------------------------------------------- compile

    def model(self, name: str) -> Path:
        """Write a model, inputs for it, and what ONNX Runtime makes of them."""
        folder = self._of(name)
        if not (folder / "expected.npz").exists():
            folder.mkdir(parents=True, exist_ok=True)
            network, options = SUITE[name]
            model = suite_model(network) if network in LIGHT else models.build(network, **options)
            onnx.save(model, folder / "model.onnx")
            feeds = suite_feeds(model)
            np.savez(folder / "feeds.npz", **feeds)
            np.savez(
                folder / "expected.npz", *onnxruntime(folder / "model.onnx", feeds, available_threads())()
            )
        return folder / "model.onnx"

    def compile(self, name: str, machine: str | None = None) -> Row:
        """For every budget; by the measured profile, or by that of a data sheet."""
        label = machine or {None: "default", DATA_SHEET: DATA_SHEET}.get(self.machine, "measured")
        artifact = self._of(name) / f"{label}.hyb"
        used = machine or self.machine
        budgets = self.arguments.budgets if machine is None else DATA_SHEET_BUDGETS
        options = ["--gpu-memory", budgets, *(["--machine", used] if used else []), *_precision(name)]
        row = self._compile(name, artifact, f"{self.cuda}+{self.arguments.isa}", *options)
        if is_failure(row):
            return row
        budgets = sorted((plan["budget_bytes"] for plan in row["plans"]), reverse=True)
        return {"target": "gpu", "artifact": str(artifact), "machine": label, "budgets": budgets}

    def compile_for_cpu(self, name: str) -> Row:
        row = self._compile(name, self._of(name) / "cpu.hyb", self.arguments.isa)
        return row if is_failure(row) else {"target": "cpu"}

    def _compile(self, name: str, artifact: Path, target: str, *options: str) -> Row:
        command = ["-m", "hybridc.cli", "compile", self._of(name) / "model.onnx", "-o", artifact]
        ran = python(*command, "--target", target, *options, "--json", limit_s=300 * self._patience)
        return json_of(ran, {"table": "compile", "model": name, "target": target})

    def _of(self, name: str) -> Path:
        return self.folder / name.replace(":", "_")

    def _chosen(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.arguments.models]

    @cached_property
    def _patience(self) -> int:
        """Times that a time limit is longer where the GPU is emulated."""
        return 10 if self.arguments.emulate_gpu else 1

    @cached_property
    def _emulation(self) -> list[str]:
        return ["--emulate-gpu", str(EMULATED_BYTES)] if self.arguments.emulate_gpu else []


def _precision(name: str) -> list[str]:
    """Options of the command line for a model of the suite."""
    precision = name.partition("@")[2]
    return ["--precision", precision] if precision else []


def _is_measured(row: Row, name: str) -> bool:
    return row["table"] == "sessions" and row["model"] == name and row["machine"] != DATA_SHEET


if __name__ == "__main__":
    sys.exit(main())
