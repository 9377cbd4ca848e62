"""Run a compiled artifact, on inputs from .npy files or drawn at random.

The GPU is the computer's own, or an emulated one of a given size: same artifact, same results,
but meaningless times.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hybridc
from hybridc.cli.support.arguments import (
    add_drawn_sizes,
    add_emulated_gpu,
    add_host_memory,
    add_json,
    add_plan_memory,
    add_threads,
    add_trust,
)
from hybridc.cli.support.files import (
    existing_artifact,
    make_folder,
    named_file,
    print_json,
    safe_file_names,
    write_array,
    write_text,
)
from hybridc.cli.support.imports import lasting_imports
from hybridc.cli.support.terminal import output_width, print_text
from hybridc.options import format_bytes, parse_count, parse_seed

if TYPE_CHECKING:
    import numpy as np

    from hybridc.report.accesses import FunctionAccesses
    from hybridc.runtime import Session

HELP = "run an artifact"
EXAMPLE = """\
  hybridc run resnet.hyb --input data=cat.npy --output outputs
  hybridc run resnet.hyb --random --emulate-gpu 64MiB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, metavar="OUT.hyb", help="the artifact")
    parser.add_argument(
        "--input",
        type=partial(named_file, "--input"),
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="an input and the file of its array; may be repeated",
    )
    parser.add_argument("--random", action="store_true", help="draw inputs without a file at random")
    add_drawn_sizes(parser, "for --random")
    parser.add_argument(
        "--seed", type=parse_seed, default=0, metavar="N", help="seed of --random (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for the outputs, one .npy file each"
    )
    add_emulated_gpu(parser)
    add_threads(parser)
    add_plan_memory(parser)
    add_host_memory(parser)
    parser.add_argument(
        "--repeat",
        type=parse_count,
        default=1,
        metavar="N",
        help="number of timed runs (default: %(default)s)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="run once more, and write the predicted and the measured run for Perfetto, ui.perfetto.dev; with"
        " --emulate-gpu also count what each kernel does to memory",
    )
    add_trust(parser)
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    existing_artifact(arguments.artifact)
    if arguments.output is not None:
        make_folder(arguments.output)
    with lasting_imports():
        importlib.import_module("hybridc.runtime")
    session = hybridc.load(
        arguments.artifact,
        threads=arguments.threads,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        emulate_gpu=arguments.emulate_gpu,
        trusted_keys=arguments.trust,
    )
    from hybridc import emulator
    from hybridc.cli.support.feeds import gather_feeds, of_sizes

    inputs = of_sizes(session.get_inputs(), arguments.dim)
    feeds = gather_feeds(inputs, arguments.input, arguments.seed if arguments.random else None)
    names = [output.name for output in session.get_outputs()]
    results, seconds = _timed_runs(session, names, feeds, arguments.repeat)
    accesses: list[FunctionAccesses] = []
    if arguments.trace is not None:
        accesses = _write_trace(session, feeds, arguments.trace, arguments.emulate_gpu is not None)
    report = {
        "outputs": _save(dict(zip(names, results, strict=True)), arguments.output),
        "seconds": seconds,
        "memory": {device.value: dataclasses.asdict(used) for device, used in session.memory().items()},
        # what the device itself counted, independent of the session's books
        "emulated_peak_bytes": None if arguments.emulate_gpu is None else emulator.statistics().peak_bytes,
        "accesses": [row.to_json() for row in accesses],
    }
    if arguments.json:
        print_json(report)
    else:
        print_text(_summary(report))
        if accesses:
            _print_accesses(accesses)
    return 0


def _timed_runs(
    session: Session, names: list[str], feeds: dict[str, np.ndarray], repeat: int
) -> tuple[list[np.ndarray], list[float]]:
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        results = session.run(names, feeds)
        seconds.append(time.perf_counter() - start)
    return results, seconds


def _write_trace(
    session: Session, feeds: dict[str, np.ndarray], path: Path, is_emulated: bool
) -> list[FunctionAccesses]:
    """Write the measured run beside the predicted. Gives what kernels do to memory, if it can be counted."""
    from hybridc import emulator
    from hybridc.report.accesses import accesses_of, by_function
    from hybridc.report.trace import trace_to_json

    artifact = session.artifact_for(feeds)
    graph, plan = artifact.graph, artifact.plan
    measured = session.measure(feeds)
    launches = {}
    if is_emulated:
        counted = emulator.count_launches(lambda: session.measure(feeds))
        launches = emulator.launches_of_steps(graph, plan, counted)
    counts = {position: accesses_of(own).to_json() for position, own in launches.items()}
    trace = trace_to_json(graph, plan, measured, is_emulated=is_emulated, counts=counts)
    write_text(path, json.dumps(trace) + "\n")
    return by_function(graph, plan, launches)


def _print_accesses(accesses: list[FunctionAccesses]) -> None:
    from hybridc.report.accesses import accesses_text

    print_text(f"\n{accesses_text(accesses, output_width())}")


def _save(results: dict[str, np.ndarray], folder: Path | None) -> list[dict[str, Any]]:
    """Write the outputs if there is a folder, and describe them."""
    files = safe_file_names(results, ".npy")
    described = []
    for name, array in results.items():
        path = folder / files[name] if folder is not None else None
        if path is not None:
            write_array(path, array)
        described.append(
            {
                "name": name,
                "shape": list(array.shape),
                "dtype": str(array.dtype),
                "path": str(path) if path is not None else None,
            }
        )
    return described


def _summary(report: dict[str, Any]) -> str:
    from hybridc.report.table import format_us, plural, printable

    lines = []
    for output in report["outputs"]:
        shape = "x".join(map(str, output["shape"])) or "scalar"
        place = f" -> {output['path']}" if output["path"] else ""
        lines.append(f"{printable(output['name'])}: {output['dtype']} {shape}{place}")
    times_us = [seconds * 1e6 for seconds in report["seconds"]]
    best = f" at the median, {format_us(min(times_us))} at best" if len(times_us) > 1 else ""
    lines.append(f"{plural(len(times_us), 'run')}: {format_us(statistics.median(times_us))}{best}")
    for device, used in report["memory"].items():
        if used["planned_bytes"] or used["allocated_bytes"]:
            planned, allocated = format_bytes(used["planned_bytes"]), format_bytes(used["allocated_bytes"])
            lines.append(f"{device} memory: {planned} planned, {allocated} allocated")
    if report["emulated_peak_bytes"] is not None:
        lines.append(f"emulated GPU: {format_bytes(report['emulated_peak_bytes'])} at the peak")
    return "\n".join(lines)
