"""Run a compiled artifact, on inputs from .npy files or drawn at random.

The GPU is the computer's own, or an emulated one of a given size: same artifact, same results,
but no speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridc.cli.arguments import add_json, add_threads
from hybridc.cli.files import existing_artifact, make_folder, print_json, safe_file_names, write_array
from hybridc.errors import UsageError
from hybridc.options import format_bytes, parse_bytes, parse_count, parse_seed

if TYPE_CHECKING:
    import numpy as np

    from hybridc.runtime import Session

HELP = "run an artifact"
EXAMPLE = """\
  hybridc run resnet.hyb --input data=cat.npy --output outputs
  hybridc run resnet.hyb --random --emulate-gpu 64MiB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, metavar="OUT.hyb")
    parser.add_argument(
        "--input",
        type=_split_input,
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="an input and its array; may be repeated",
    )
    parser.add_argument("--random", action="store_true", help="draw the inputs that have no file")
    parser.add_argument(
        "--seed", type=parse_seed, default=0, metavar="N", help="of --random (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for the outputs, one .npy file each"
    )
    parser.add_argument(
        "--emulate-gpu",
        type=parse_bytes,
        metavar="64MiB",
        help="run on an emulated GPU with this much memory",
    )
    add_threads(parser)
    parser.add_argument(
        "--repeat",
        type=parse_count,
        default=1,
        metavar="N",
        help="run this often, and time it (default: once)",
    )
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    existing_artifact(arguments.artifact)
    if arguments.output is not None:
        make_folder(arguments.output)
    if arguments.emulate_gpu is not None:  # before anything loads TVM, which looks for the GPU's libraries
        from hybridc import emulator

        emulator.start(arguments.emulate_gpu)
    from hybridc import runtime
    from hybridc.cli.feeds import gather_feeds

    session = runtime.load(arguments.artifact, threads=arguments.threads)
    feeds = gather_feeds(session.get_inputs(), arguments.input, arguments.seed if arguments.random else None)
    names = [output.name for output in session.get_outputs()]
    results, seconds = _timed_runs(session, names, feeds, arguments.repeat)
    outputs = _save(dict(zip(names, results, strict=True)), arguments.output)
    memory = {device.value: dataclasses.asdict(used) for device, used in session.memory().items()}
    if arguments.json:
        print_json({"outputs": outputs, "seconds": seconds, "memory": memory})
    else:
        print(_summary(outputs, seconds, memory))
    return 0


def _split_input(text: str) -> tuple[str, Path]:
    """Names may hold `=`, so the file begins after the last one."""
    name, _, path = text.rpartition("=")
    if not name or not path:
        raise UsageError("HC533", f"{text!r} is not an input", remedy="write --input NAME=FILE.npy")
    return name, Path(path)


def _timed_runs(
    session: Session, names: list[str], feeds: dict[str, np.ndarray], repeat: int
) -> tuple[list[np.ndarray], list[float]]:
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        results = session.run(names, feeds)
        seconds.append(time.perf_counter() - start)
    return results, seconds


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


def _summary(outputs: list[dict[str, Any]], seconds: list[float], memory: dict[str, dict[str, int]]) -> str:
    from hybridc.report.table import format_us, plural, printable

    lines = []
    for output in outputs:
        shape = "x".join(map(str, output["shape"])) or "scalar"
        place = f" -> {output['path']}" if output["path"] else ""
        lines.append(f"{printable(output['name'])}: {output['dtype']} {shape}{place}")
    median, best = statistics.median(seconds), min(seconds)
    times = (
        f"median {format_us(median * 1e6)}, best {format_us(best * 1e6)}"
        if len(seconds) > 1
        else format_us(median * 1e6)
    )
    lines.append(f"{plural(len(seconds), 'run')}: {times}")
    for device, used in memory.items():
        lines.append(
            f"{device} memory: {format_bytes(used['planned_bytes'])} planned,"
            f" {format_bytes(used['allocated_bytes'])} allocated"
        )
    return "\n".join(lines)
