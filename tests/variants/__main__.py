"""Networks through onnxruntime's tools, compiled: how many agree with onnxruntime, and what is refused."""

from __future__ import annotations

import argparse
import json
import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.variants.judge import NOT_MADE, Verdict, judge
from tests.variants.networks import NETWORKS, made
from tests.variants.tools import TOOLS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.variants", description=__doc__)
    parser.add_argument("--network", default="", metavar="REGEX", help="networks whose names contain this")
    parser.add_argument("--tool", default="", metavar="REGEX", help="tools whose names contain this")
    parser.add_argument("--target", default="avx2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every verdict")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # the tools say much
    verdicts: list[Verdict] = []
    for network in NETWORKS:
        if not re.search(given.network, network):
            continue
        original = made(network)
        for tool in TOOLS:
            if not re.search(given.tool, tool):
                continue
            with tempfile.TemporaryDirectory() as folder:
                verdicts.append(judge(network, tool, original, Path(folder), given.target))
            found = verdicts[-1]
            print(network, tool, found.outcome, found.reason or f"{found.error:.1e}", sep="  ", flush=True)
            if given.json is not None:  # after each: the whole takes hours
                _write(given.json, given.target, verdicts)
    counts = Counter(verdict.outcome for verdict in verdicts)
    print(f"{sum(counts.values()) - counts[NOT_MADE]} files", dict(counts))
    return 0


def _write(path: Path, target: str, verdicts: Sequence[Verdict]) -> None:
    counts = Counter(verdict.outcome for verdict in verdicts)
    record = {"target": target, "counts": counts, "verdicts": [asdict(v) for v in verdicts]}
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
