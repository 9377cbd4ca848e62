"""Write a bundle: a folder that runs an artifact where there is no Python.

It holds the artifact's code and weights, TVM's small runtime libraries, a runner that reads and writes
.npy files, and a library with a C interface. Beside it a run needs glibc, and for GPU parts the NVIDIA
driver.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridc.cli.support.arguments import add_json
from hybridc.cli.support.files import existing_artifact, print_json
from hybridc.cli.support.terminal import print_text
from hybridc.options import format_bytes

HELP = "write a folder that runs an artifact without Python"
EXAMPLE = """\
  hybridc bundle resnet.hyb -o resnet
  hybridc bundle resnet.hyb -o resnet --archive"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, metavar="OUT.hyb", help="the artifact")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--archive", action="store_true", help="write the folder to DIR.tar.gz instead of leaving it as it is"
    )
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    existing_artifact(arguments.artifact)
    from hybridc.bundle import write_bundle

    made = write_bundle(arguments.artifact, arguments.output, archive=arguments.archive)
    beside_bytes = made.size_bytes - made.weights_bytes
    if arguments.json:
        print_json(
            {
                "path": str(made.path),
                "size_bytes": made.size_bytes,
                "weights_bytes": made.weights_bytes,
                "has_gpu_code": made.has_gpu_code,
            }
        )
    else:
        sizes = f"{format_bytes(made.weights_bytes)} of weights and {format_bytes(beside_bytes)} beside them"
        run = "" if arguments.archive else f"\nRun it: {made.path / 'run'} --random"
        print_text(f"{made.path}: {sizes}{run}")
    return 0
