"""Check an artifact or a bundle and run none of its code: hashes, plans, and with --trust who signed it."""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridc.cli.support.arguments import add_json, add_trust
from hybridc.cli.support.files import existing_artifact, print_json
from hybridc.cli.support.terminal import print_text

HELP = "check hashes, plans and signature of an artifact or a bundle"
EXAMPLE = "  hybridc verify resnet.hyb --trust public.pem"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "artifact", type=Path, metavar="OUT.hyb", help="the artifact, or the folder of a bundle"
    )
    add_trust(parser)
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    from hybridc.artifact import open_artifact
    from hybridc.bundle.check import check_bundle, is_bundle
    from hybridc.runtime.session import verify_plans

    if is_bundle(arguments.artifact):
        check_bundle(arguments.artifact, arguments.trust)
    else:
        existing_artifact(arguments.artifact)
        artifact = open_artifact(
            arguments.artifact,
            check_host=False,
            every_instruction_set=True,
            trusted_keys=arguments.trust,
        )
        verify_plans(artifact)
        artifact.close()
    if arguments.json:
        print_json({"path": str(arguments.artifact), "is_signature_checked": arguments.trust is not None})
    else:
        unsigned = "; who made it was not checked: give --trust PUBLIC.pem" if arguments.trust is None else ""
        print_text(f"{arguments.artifact} is whole{unsigned}")
    return 0
