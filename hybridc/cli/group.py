"""Plan several artifacts that take turns in one budget of GPU memory, such as the parts of a pipeline.

What one of them needs while it runs is shared. Weights of those that rest stay on the GPU if there is room;
others are copied there again in their turn, beside kernels that do not need them yet.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridc.cli.support.arguments import add_json, add_trust, named_count
from hybridc.cli.support.files import existing_artifact, print_json
from hybridc.cli.support.terminal import output_width, print_text
from hybridc.options import parse_bytes

HELP = "plan artifacts that share one GPU budget"
EXAMPLE = """\
  hybridc group encoder.hyb unet.hyb decoder.hyb --gpu-memory 4GiB
  hybridc group encoder.hyb unet.hyb --gpu-memory 2GiB --runs unet=20"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "artifacts",
        type=Path,
        nargs="+",
        metavar="OUT.hyb",
        help="the artifacts, in the order of their turns",
    )
    parser.add_argument(
        "--gpu-memory",
        type=parse_bytes,
        required=True,
        metavar="4GiB",
        help="GPU memory that they never exceed together",
    )
    parser.add_argument(
        "--runs",
        type=named_count,
        action="append",
        default=[],
        metavar="NAME=20",
        help="how often an artifact runs in each of its turns (default: once); may be repeated",
    )
    add_trust(parser)
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    for path in arguments.artifacts:
        existing_artifact(path)
    from hybridc.group import candidates, plan_group, verify_group
    from hybridc.report.group import group_text, group_to_json
    from hybridc.runtime.group import open_members

    artifacts = open_members(
        arguments.artifacts, check_weights=False, check_host=False, trusted_keys=arguments.trust
    )
    group = plan_group(candidates(artifacts, dict(arguments.runs)), arguments.gpu_memory)
    verify_group(group)
    if arguments.json:
        print_json(group_to_json(group))
    else:
        print_text(group_text(group, output_width()))
    return 0
