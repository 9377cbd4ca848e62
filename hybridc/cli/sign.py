"""Sign an artifact or a bundle, so that others can check who made its native code.

The signature covers the hashes of all its files. It is written beside them, and no other file is changed, so
a model can be compiled where the key is not. `run`, `bench` and `verify` check it with --trust.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridc.cli.support.arguments import add_json
from hybridc.cli.support.files import existing_artifact, print_json
from hybridc.cli.support.terminal import print_text

HELP = "sign an artifact or a bundle with an ed25519 key"
EXAMPLE = """\
  hybridc sign resnet.hyb --key key.pem
  hybridc sign bundle --key key.pem"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "artifact", type=Path, metavar="OUT.hyb", help="the artifact, or the folder of a bundle"
    )
    parser.add_argument(
        "--key",
        type=Path,
        required=True,
        metavar="KEY.pem",
        help="file with an ed25519 private key, in PEM or OpenSSH's format; the passphrase of an encrypted"
        " one is read from the environment variable HYBRIDC_KEY_PASSPHRASE",
    )
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    from hybridc.artifact import open_artifact
    from hybridc.artifact.manifest import MANIFEST
    from hybridc.artifact.signature import sign_file
    from hybridc.bundle.check import check_bundle, is_bundle
    from hybridc.bundle.write import HASHES

    if is_bundle(arguments.artifact):
        check_bundle(arguments.artifact)  # nobody signs what is damaged already
        signed = arguments.artifact / HASHES
    else:
        existing_artifact(arguments.artifact)
        open_artifact(arguments.artifact, check_host=False, every_instruction_set=True).close()
        signed = arguments.artifact / MANIFEST
    signature = sign_file(signed, arguments.key)
    if arguments.json:
        print_json({"signature": str(signature)})
    else:
        print_text(f"{arguments.artifact} is signed: {signature}")
    return 0
