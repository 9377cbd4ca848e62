"""The process that judges networks: their names come in by lines, verdicts go out as lines of JSON.

python -m tests.wheels.worker TARGET FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path


def main() -> None:
    # compilers and kernels may print; what they say must not stand between the verdicts
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    target, folder = sys.argv[1], Path(sys.argv[2])
    if target.startswith("cuda"):
        from hybridc import emulator
        from hybridc.options import parse_bytes

        emulator.start(parse_bytes("256MiB"))  # before anything loads TVM
    from tests.wheels.judge import judge
    from tests.wheels.table import named

    networks = named()
    print("ready", file=verdicts, flush=True)
    for line in sys.stdin:
        name = line.strip()
        verdict = judge(name, *networks[name], target, folder)
        print(json.dumps(dataclasses.asdict(verdict)), file=verdicts, flush=True)


if __name__ == "__main__":
    main()
