"""What is predicted of a decoder that is larger than its GPU, beside others' ways to run it.

    python benchmarks/decoder_plans.py [--drawn 6] [--seed 1] [--seconds 5]

Llama of seven billion parameters with int4 weights, of which only the shapes are needed, and caches in
float16 or in 8 bits, by `hybridc plan`: at the points of `NAMED`, with either, and at some that are drawn, of
all profiles of GPUs with at most `SMALL` of memory. Others' ways have the same caches. Nothing runs: the
tokens a second of our plan, of a split in whole layers, of streaming and of the CPU alone come from the same
simulator with the same times of kernels, contention and efficiencies included. Planning is timed, in seconds
of this computer. Exits with 1 if a wanted figure is missed at a named point."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from common import write_result

from hybridc.machine import load_machine
from hybridc.options import KV_CACHES

GIB = 1 << 30
SMALL = 12 * GIB
NAMED = (
    ("laptop-4gb", 2048, 3.75),
    ("laptop-4gb", 8192, 3.75),
    ("desktop-8gb", 2048, 7.0),
    ("desktop-8gb", 8192, 7.0),
    ("desktop-12gb", 2048, 11.0),
    ("desktop-12gb", 8192, 11.0),
)
"""Profile, places in the caches, and the budget in GiB."""
CONTEXTS = (512, 1024, 2048, 4096, 8192)
SHARES = (0.4, 0.95)
"""Of the GPU's memory, between which budgets are drawn."""
GAIN_WANTED, GAP_WANTED, SECONDS_WANTED = 1.6, 0.10, 60.0
THREADS = 8


@dataclass(frozen=True, slots=True)
class Point:
    """What is planned, and for which GPU."""

    machine: str
    context: int
    gib: float
    kv_cache: str
    is_drawn: bool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drawn", type=int, default=6, help="points beside the named ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of search, on the nominal machine")
    arguments = parser.parse_args()
    points = [Point(*named, kv_cache, is_drawn=False) for kv_cache in KV_CACHES for named in NAMED]
    points += drawn(arguments.drawn, arguments.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for point in points:
            rows.append(row_of(point, Path(folder), arguments.seconds) | {"seed": arguments.seed})
            print(text(rows[-1]), flush=True)
    print("written to", write_result("decoder_plans", rows))
    return 0 if all(is_as_wanted(row) for row in rows if not row["is_drawn"]) else 1


def drawn(count: int, seed: int) -> list[Point]:
    """Points of profiles that come with the compiler."""
    draw = random.Random(seed)
    folder = resources.files("hybridc.machines")
    names = sorted(Path(str(each)).stem for each in folder.iterdir() if each.name.endswith(".json"))
    memory = {name: load_machine(name).gpu.memory_bytes for name in names}
    small = [name for name in names if memory[name] <= SMALL]
    found = []
    for _ in range(count):
        name, context = draw.choice(small), draw.choice(CONTEXTS)
        gib = round(draw.uniform(*SHARES) * memory[name] / GIB, 2)
        found.append(Point(name, context, gib, draw.choice(KV_CACHES), is_drawn=True))
    return found


def row_of(point: Point, folder: Path, seconds: float) -> dict[str, Any]:
    """What `hybridc plan` says of a point, in a cache of its own, which has no plan yet."""
    model = folder / f"llama_{point.context}.onnx"
    if not model.exists():
        size = f"context={point.context}"
        hybridc("models", "export", "llama_7b", str(model), "--param", size, "--no-weights")
    place = ("--machine", point.machine, "--gpu-memory", f"{point.gib}GiB", "--threads", str(THREADS))
    how = ("--no-weights", "--dim", "sequence=1", "--target", "cuda+avx2", "--kv-cache", point.kv_cache)
    effort = ("--plan-seconds", str(seconds), "--no-cache", "--json")
    plan = json.loads(hybridc("plan", str(model), *how, *place, *effort))
    ways = {way["name"]: way["tokens_per_s"] for way in plan["decoder"]["others"]}
    return {
        "machine": point.machine,
        "context": point.context,
        "budget_gib": point.gib,
        "kv_cache": point.kv_cache,
        "is_drawn": point.is_drawn,
        "needed_gib": plan["all_gpu_peak_bytes"] / GIB,
        "tokens_per_s": plan["decoder"]["tokens_per_s"],
        "others": ways,
        "bound_tokens_per_s": 1e6 / plan["time_bound_us"],
        "plan_seconds": plan["planning"]["seconds"],
    }


def hybridc(*arguments: str) -> str:
    command = (sys.executable, "-m", "hybridc", *arguments)
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout


def gain(row: dict[str, Any]) -> float:
    """Over the best of the others that fit."""
    return float(row["tokens_per_s"] / max(us for us in row["others"].values() if us))


def gap(row: dict[str, Any]) -> float:
    """How much slower than the bound."""
    return float(row["bound_tokens_per_s"] / row["tokens_per_s"] - 1)


def is_as_wanted(row: dict[str, Any]) -> bool:
    return gain(row) >= GAIN_WANTED and gap(row) <= GAP_WANTED and row["plan_seconds"] <= SECONDS_WANTED


def text(row: dict[str, Any]) -> str:
    others = ", ".join(f"{name} {tokens:.1f}" for name, tokens in row["others"].items() if tokens)
    return (
        f"{row['machine']} {row['context']} places in {row['kv_cache']}, "
        f"{row['budget_gib']} of {row['needed_gib']:.2f} GiB: "
        f"{row['tokens_per_s']:.1f} tokens/s ({others}), {gain(row):.2f} times the best, "
        f"gap {gap(row):.0%}, planned in {row['plan_seconds']:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
