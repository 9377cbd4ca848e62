"""Errors against ONNX Runtime and GPU bytes against the budget, for the suite on every target.

    python benchmarks/accuracy.py [--models squeezenet,bert] [--targets avx2,cuda+avx2]

Each GPU budget runs on an emulated GPU that has exactly that much memory. Exits with 1 if an error is
above 1e-4 of the output's scale or more was allocated than budgeted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import LIGHT_MODELS, OWN_MODELS, suite_model, write_result

TARGETS = ("avx2", "avx512", "cuda+avx2")
BUDGETS = "100%,50%,25%"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join((*LIGHT_MODELS, *OWN_MODELS)))
    parser.add_argument("--targets", default=",".join(TARGETS))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models.split(","):
            path = Path(folder) / f"{name}.onnx"
            path.write_bytes(suite_model(name).SerializeToString())
            for target in arguments.targets.split(","):
                for row in compare(path, target):
                    rows.append({"model": name, "target": target, **row})
                    print(json.dumps(rows[-1]), flush=True)
            path.unlink()
    print("written to", write_result("accuracy", rows))
    return 0 if all(row["passed"] for row in rows) else 1


def compare(path: Path, target: str) -> list[dict[str, Any]]:
    """`hybridc compare` at every budget of the target."""
    command = [sys.executable, "-m", "hybridc.cli", "compare", str(path), "--target", target, "--json"]
    if target.startswith("cuda"):
        command += ["--gpu-memory", BUDGETS, "--emulate-gpu"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        return [{"passed": False, "exit_code": done.returncode}]
    return json.loads(done.stdout)["comparisons"]


if __name__ == "__main__":
    sys.exit(main())
