"""The process that runs tests: their names come in by lines, verdicts go out as lines of JSON.

python -m tests.onnx_suite.worker TARGET
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys


def main() -> None:
    # compilers and kernels may print; what they say must not stand between the verdicts
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.argv[1].startswith("cuda"):
        from hybridc import emulator
        from hybridc.options import parse_bytes

        emulator.start(parse_bytes("1GiB"))
    from tests.onnx_suite.cases import judge, tests, use_target

    use_target(sys.argv[1])
    print(json.dumps(sorted(tests())), file=verdicts, flush=True)
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(judge(line.strip()))), file=verdicts, flush=True)


if __name__ == "__main__":
    main()
