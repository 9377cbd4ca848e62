"""Measure the runs of an artifact: percentiles, throughput, memory, and each lane's time beside the planned.

With `--compare onnxruntime` the model that it was compiled from runs there in turns, on the CPU and with as
many threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import resource
import time
from collections.abc import Callable, Iterator
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
from hybridc.cli.support.files import existing_artifact, existing_model, named_file, print_json
from hybridc.cli.support.terminal import output_width, print_text
from hybridc.errors import UsageError
from hybridc.options import format_bytes, parse_count, parse_seed

if TYPE_CHECKING:
    import numpy as np

    from hybridc.report.bench import Peer
    from hybridc.runtime import Session

HELP = "measure the runs of an artifact"
EXAMPLE = """\
  hybridc bench resnet.hyb
  hybridc bench resnet.hyb --compare onnxruntime --model resnet.onnx"""
_ROUNDS = 5
"""In which ours and the peer's runs take turns, so that whatever else the computer does concerns both."""
_MEASURED_RUNS = 5
"""In which each step is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, metavar="OUT.hyb", help="the artifact")
    parser.add_argument(
        "--input",
        type=partial(named_file, "--input"),
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="an input and the file of its array; others are drawn at random; may be repeated",
    )
    add_drawn_sizes(parser, "of random inputs")
    parser.add_argument(
        "--seed", type=parse_seed, default=0, metavar="N", help="seed of random inputs (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=parse_count, default=100, metavar="N", help="measured runs (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-up", type=parse_count, default=5, metavar="N", help="runs before these (default: %(default)s)"
    )
    parser.add_argument(
        "--compare", choices=("onnxruntime",), help="another runtime to run the model of --model by"
    )
    parser.add_argument(
        "--model", type=Path, metavar="MODEL.onnx", help="what the artifact was compiled from"
    )
    add_emulated_gpu(parser, "; its times mean nothing")
    add_plan_memory(parser)
    add_threads(parser)
    add_host_memory(parser)
    add_trust(parser)
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    existing_artifact(arguments.artifact)
    if (arguments.compare is None) != (arguments.model is None):
        remedy = "write --compare onnxruntime --model MODEL.onnx"
        raise UsageError("HC500", "--compare and --model belong together", remedy=remedy)
    session = hybridc.load(
        arguments.artifact,
        threads=arguments.threads,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        emulate_gpu=arguments.emulate_gpu,
        trusted_keys=arguments.trust,
    )
    from hybridc.cli.support.feeds import gather_feeds, of_sizes
    from hybridc.report.bench import BenchReport, bench_text, bench_to_json, lane_times, latencies

    inputs = of_sizes(session.get_inputs(), arguments.dim)
    feeds = gather_feeds(inputs, arguments.input, arguments.seed)
    runs: dict[str, Callable[[], object]] = {"hybridc": lambda: session.run(None, feeds)}
    if arguments.compare is not None:
        runs[arguments.compare] = _reference(session, arguments.model, feeds)
    seconds = _timed(runs, arguments.warm_up, arguments.repeat)
    artifact = session.artifact_for(feeds)
    graph, plan = artifact.graph, artifact.plan
    report = BenchReport(
        latencies=latencies(seconds["hybridc"]),
        predicted_us=plan.makespan_us,
        lanes=lane_times(graph, plan, [session.measure(feeds) for _ in range(_MEASURED_RUNS)]),
        is_emulated=arguments.emulate_gpu is not None,
        peer=None if arguments.compare is None else _peer(arguments.compare, seconds[arguments.compare]),
    )
    memory = {device.value: dataclasses.asdict(used) for device, used in session.memory().items()}
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if arguments.json:
        print_json(bench_to_json(report) | {"memory": memory, "process_peak_bytes": peak_bytes})
    else:
        print_text("\n".join([bench_text(report, output_width()), "", *_memory_lines(memory, peak_bytes)]))
    return 0


def _timed(runs: dict[str, Callable[[], object]], warm_up: int, repeat: int) -> dict[str, list[float]]:
    """Seconds of each runtime's runs, by its name."""
    for run in runs.values():
        for _ in range(warm_up):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for count in _parts(repeat):
        for name, run in runs.items():
            for _ in range(count):
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _parts(repeat: int) -> Iterator[int]:
    """The runs of each round."""
    for number in range(_ROUNDS):
        yield repeat * (number + 1) // _ROUNDS - repeat * number // _ROUNDS


def _reference(session: Session, model: Path, feeds: dict[str, np.ndarray]) -> Callable[[], object]:
    """What runs the model by ONNX Runtime. Raises UsageError HC534, or HC535 for another model."""
    from hybridc.cli.support.reference import open_reference, refused

    existing_model(model)
    if hashlib.sha256(model.read_bytes()).hexdigest() != session.artifact.manifest.source.sha256:
        what = "the artifact was compiled from another model"
        raise UsageError("HC535", what, where=str(model), remedy="give the model that it was compiled from")
    reference = open_reference(model, session.threads)
    try:
        reference.run(None, feeds)
    except Exception as error:  # onnxruntime's errors share no base
        raise refused(model, error) from None
    return lambda: reference.run(None, feeds)


def _peer(name: str, seconds: list[float]) -> Peer:
    from importlib.metadata import version

    from hybridc.report.bench import Peer, latencies

    return Peer(name, version(name), latencies(seconds))


def _memory_lines(memory: dict[str, Any], peak_bytes: int) -> Iterator[str]:
    for device, used in memory.items():
        if used["planned_bytes"] or used["allocated_bytes"]:
            planned, allocated = format_bytes(used["planned_bytes"]), format_bytes(used["allocated_bytes"])
            yield f"{device} memory: {planned} planned, {allocated} allocated"
    yield f"process: {format_bytes(peak_bytes)} at the peak, Python and all"
