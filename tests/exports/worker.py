"""The process that judges exports: their names come in by lines, verdicts go out as lines of JSON.

python -m tests.exports.worker TARGET [FOLDER]
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path


def main() -> None:
    # exporters, compilers and kernels may print; what they say must not stand between the verdicts
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    target, folder = sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None
    if target.startswith("cuda"):
        from hybridc import emulator
        from hybridc.options import parse_bytes

        emulator.start(parse_bytes("256MiB"))  # before anything loads TVM
    import torch

    from tests.exports.export import VARIANTS
    from tests.exports.judge import judge

    torch.set_num_threads(1)
    print("ready", file=verdicts, flush=True)
    for line in sys.stdin:
        verdict = judge(VARIANTS[line.strip()], target, folder)
        print(json.dumps(dataclasses.asdict(verdict)), file=verdicts, flush=True)


if __name__ == "__main__":
    main()
