"""An artifact for a range of sizes against one for exactly the sizes at the end of each of its buckets.

    python benchmarks/ranges.py MODEL.onnx --dim batch=1..8 --dim sequence=1..512 [--limit input_ids=30522]
    python benchmarks/ranges.py resnet50 --dim batch=1..32 [--target avx512] [--threads 2] [--seconds 1]
    python benchmarks/ranges.py MODEL.onnx --dim batch=1..8 --dim sequence=1..512 --drawn 12 [--seed 1]
    python benchmarks/ranges.py MODEL.onnx --dim batch=1..8 --dim sequence=1..512 --compile 3

MODEL is a file, or one of ours with an open batch. Of each bucket: how much longer a run of its largest sizes
takes than one of an artifact for these sizes alone, and of sizes inside, drawn, how long they take against
the largest ones. With `--drawn` instead sizes are drawn from the whole range, each as likely as its double,
and compared with artifacts for these sizes alone, and with onnxruntime, which takes any. With `--compile`
nothing runs: so often the range and its largest bucket alone are compiled by `hybridc compile`, in seconds of
a processor, all threads together, with nothing of earlier compilations.
What is compared takes turns; figures are medians, and ratios those of pairs. Results go to
benchmarks/results/ranges.json, beside those of other models.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from common import rows_with_origin, write_result

import hybridc
from hybridc import models
from hybridc.runtime import Session

Feeds = dict[str, np.ndarray]
FEWEST_PAIRS = 5
ROUNDS = 3
PAUSE_SECONDS = 0.2
"""Longer than threads spin that have nothing to do."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dim", action="append", required=True, metavar="NAME=LOW..HIGH")
    parser.add_argument("--limit", action="append", default=[], metavar="INPUT=N", help="of integers; else 2")
    parser.add_argument("--target", default="avx2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--inside", type=int, default=2, help="sizes that are drawn in each bucket")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each comparison")
    parser.add_argument("--drawn", type=int, default=0, metavar="SIZES")
    parser.add_argument("--seed", type=int, default=0, help="of the sizes that are drawn")
    parser.add_argument("--compile", type=int, default=0, metavar="PAIRS")
    given = parser.parse_args()
    dims = dict(text.split("=") for text in given.dim)
    limits = {name: int(most) for name, most in (text.split("=") for text in given.limit)}
    model = _model(given.model)
    if given.compile:
        return _compile_times(given, dims)
    rows = []
    with tempfile.TemporaryDirectory(prefix="hybridc-ranges-") as folder:

        def compiled(name: str, sizes: Mapping[str, Any]) -> Session:
            path = Path(folder) / name
            hybridc.compile(model, path, target=given.target, dims=sizes, threads=given.threads)
            return hybridc.load(path)

        if given.drawn:
            return _drawn_sizes(given, model, compiled, dims, limits)
        with compiled("range.hyb", dims) as ranged:
            for number, bucket in enumerate(ranged.buckets()):
                highs = {name: high for name, (_, high) in bucket.sizes.items()}
                feeds = _feeds(ranged, highs, limits, seed=0)
                with compiled(f"exact{number}.hyb", highs) as exact:
                    row = _bound(ranged, exact, feeds, given.seconds)
                inside = [
                    _inside(ranged, sizes, feeds, limits, given.seconds)
                    for sizes in _drawn(bucket.sizes, given.inside)
                ]
                rows.append(
                    {"model": Path(given.model).stem, "target": given.target, **row, "inside": inside}
                )
                print(rows[-1] | {"sizes": highs}, flush=True)
                rows[-1]["sizes"] = highs
    worst = max(row["over_exact"] for row in rows)
    above = max((each["of_bound"] for row in rows for each in row["inside"]), default=1.0)
    print(
        f"at bounds at most {worst:.2f} of an exact artifact; inside at most {above:.2f} of the bound's time"
    )
    _write(rows)
    return 0


def _write(rows: Sequence[Mapping[str, Any]]) -> None:
    """In the place of the rows of the same kind, model and target."""
    kept = [row for row in rows_with_origin("ranges") if _key(row) != _key(rows[0])]
    print("written to", write_result("ranges", [*kept, *rows]))


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["target"], _kind(row)


def _kind(row: Mapping[str, Any]) -> str:
    return next((key for key in ("compile_ratio", "onnxruntime_us") if key in row), "bound")


def _drawn_sizes(
    given: argparse.Namespace,
    model: onnx.ModelProto | str,
    compiled: Callable[[str, Mapping[str, Any]], Session],
    dims: Mapping[str, str],
    limits: Mapping[str, int],
) -> int:
    """Sizes of the whole range beside artifacts for them alone, and beside onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = given.threads
    source = model if isinstance(model, str) else model.SerializeToString()
    peer = onnxruntime.InferenceSession(source, options)
    names, rows = {each.name for each in peer.get_inputs()}, []
    random = np.random.default_rng(given.seed)
    with compiled("range.hyb", dims) as ranged:
        buckets = ranged.buckets()
        whole = {name: (buckets[0].sizes[name][0], high) for name, (_, high) in buckets[-1].sizes.items()}
        for number in range(given.drawn):
            sizes = {
                name: int(low * (high / low) ** random.random() + 0.5) for name, (low, high) in whole.items()
            }
            feeds = _feeds(ranged, sizes, limits, seed=number)
            fed = {name: array for name, array in feeds.items() if name in names}
            with compiled(f"exact{number}.hyb", sizes) as exact:
                row = _bound(ranged, exact, feeds, given.seconds)
            own_us, peer_us = _in_turns(
                partial(ranged.run, None, feeds), partial(peer.run, None, fed), given.seconds
            )
            rows.append(
                {
                    "model": Path(given.model).stem,
                    "target": given.target,
                    "threads": given.threads,
                    "seed": given.seed,
                    "sizes": sizes,
                    **row,
                    "onnxruntime_us": round(peer_us, 1),
                    "onnxruntime_over_range": round(peer_us / own_us, 3),
                }
            )
            print(rows[-1], flush=True)
    ratios = [row["onnxruntime_over_range"] for row in rows]
    print(
        f"at most {max(row['over_exact'] for row in rows):.2f} of an exact artifact; onnxruntime takes "
        f"{statistics.geometric_mean(ratios):.2f} times as long on average, at least {min(ratios):.2f}"
    )
    _write(rows)
    return 0


def _compile_times(given: argparse.Namespace, dims: Mapping[str, str]) -> int:
    """How much longer the range takes to compile than its largest bucket alone."""
    with tempfile.TemporaryDirectory(prefix="hybridc-ranges-") as folder:
        model, path = Path(folder) / "model.onnx", Path(folder) / "model.hyb"
        source = _model(given.model)
        onnx.save(onnx.load(source) if isinstance(source, str) else source, model)

        def compiled(sizes: Mapping[str, Any]) -> float:
            command = [sys.executable, "-m", "hybridc", "compile", str(model), "-o", str(path), "--no-cache"]
            command += ["--target", given.target, "--threads", str(given.threads)]
            for name, size in sizes.items():
                command += ["--dim", f"{name}={size}"]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        compiled(dims)  # g++ has built the compiler's own helpers then
        with hybridc.load(path) as session:
            buckets = session.buckets()
        highs = {name: high for name, (_, high) in buckets[-1].sizes.items()}
        pairs = [(compiled(dims), compiled(highs)) for _ in range(given.compile)]
    row = {
        "model": Path(given.model).stem,
        "target": given.target,
        "sizes": dict(dims),
        "buckets": len(buckets),
        "range_s": round(statistics.median(one for one, _ in pairs), 2),
        "largest_s": round(statistics.median(other for _, other in pairs), 2),
        "compile_ratio": round(statistics.median(one / other for one, other in pairs), 3),
        "pairs": len(pairs),
    }
    print(row)
    _write([row])
    return 0


def _model(name: str) -> onnx.ModelProto | str:
    """A file, or a network whose batch has the name `batch`."""
    if Path(name).exists():
        return name
    model = models.build(name, dynamic_batch=True)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


def _bound(ranged: Session, exact: Session, feeds: Feeds, seconds: float) -> dict[str, Any]:
    own = {each.name for each in exact.get_inputs()}
    fed = {name: array for name, array in feeds.items() if name in own}
    range_us, exact_us = _pairs(lambda: ranged.run(None, feeds), lambda: exact.run(None, fed), seconds)
    ratio = statistics.median(a / b for a, b in zip(range_us, exact_us, strict=True))
    return {
        "range_us": round(statistics.median(range_us), 1),
        "exact_us": round(statistics.median(exact_us), 1),
        "over_exact": round(ratio, 3),
        "pairs": len(range_us),
    }


def _inside(
    ranged: Session, sizes: Mapping[str, int], bound: Feeds, limits: Mapping[str, int], seconds: float
) -> dict[str, Any]:
    feeds = _feeds(ranged, sizes, limits, seed=1)
    inside_us, bound_us = _pairs(lambda: ranged.run(None, feeds), lambda: ranged.run(None, bound), seconds)
    ratio = statistics.median(a / b for a, b in zip(inside_us, bound_us, strict=True))
    return {"sizes": dict(sizes), "us": round(statistics.median(inside_us), 1), "of_bound": round(ratio, 3)}


def _pairs(
    one: Callable[[], object], other: Callable[[], object], seconds: float
) -> tuple[list[float], list[float]]:
    """Microseconds of both, which take turns in going first, after two runs of each to warm up."""
    for _ in range(2):
        one(), other()
    times: tuple[list[float], list[float]] = [], []
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(times[0]) < FEWEST_PAIRS:
        order = ((0, one), (1, other)) if len(times[0]) % 2 else ((1, other), (0, one))
        for place, run in order:
            begin = time.perf_counter()
            run()
            times[place].append((time.perf_counter() - begin) * 1e6)
    return times


def _in_turns(own: Callable[[], object], peer: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Medians of both, in microseconds, of rounds in which one runs after the other: threads of onnxruntime
    spin behind a run, and would take the cores from the next one."""
    medians: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        for place, run in enumerate((own, peer)):
            time.sleep(PAUSE_SECONDS)
            times = []
            run(), run()
            start = time.perf_counter()
            while time.perf_counter() - start < seconds / ROUNDS or len(times) < FEWEST_PAIRS:
                begin = time.perf_counter()
                run()
                times.append((time.perf_counter() - begin) * 1e6)
            medians[place].append(statistics.median(times))
    return statistics.median(medians[0]), statistics.median(medians[1])


def _drawn(intervals: Mapping[str, tuple[int, int]], count: int) -> list[dict[str, int]]:
    """Sizes inside of a bucket, each another one; none where it has only one."""
    random = np.random.default_rng(0)
    found: list[dict[str, int]] = []
    for _ in range(count):
        sizes = {name: int(random.integers(low, high + 1)) for name, (low, high) in intervals.items()}
        is_largest = all(size == intervals[name][1] for name, size in sizes.items())
        if not is_largest and sizes not in found:
            found.append(sizes)
    return found


def _feeds(session: Session, sizes: Mapping[str, int], limits: Mapping[str, int], seed: int) -> Feeds:
    random, feeds = np.random.default_rng(seed), {}
    for given in session.get_inputs():
        shape = [sizes[given.open[i]] if i in given.open else n for i, n in enumerate(given.shape)]
        if "mask" in given.name:
            feeds[given.name] = np.ones(shape, np.int64)
        elif "int" in given.type:
            feeds[given.name] = random.integers(0, limits.get(given.name, 2), shape)
        else:
            feeds[given.name] = random.standard_normal(shape).astype(np.float32)
    return feeds


if __name__ == "__main__":
    sys.exit(main())
