"""Published experiments with their authors' constants, and each paper's own figures beside ours.

    python benchmarks/published [--seconds 30] [--moccasin FOLDER] [--only flexgen,moccasin-250]

With `--moccasin` graphs are read from `data/` of the authors' repository, else drawn alike. With `--only`
the other experiments stay as they are in the record; `moccasin-500` and `moccasin-1000`, which take hours,
are run only if they are named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import RESULTS, write_result

from published import checkmate, flexgen, moccasin

Row = dict[str, Any]

MOST_NODES = 250
"""Of MOCCASIN's graphs that are planned within minutes."""
# What each would take is said, so that nobody looks for the figure.
NOT_REPEATED = {
    "OLLA and MODeL: memory reductions": "they are against the order and the allocator of PyTorch, measured"
    " while it runs graphs that it traces; that no memory is lost to fragmentation, as their authors say of"
    " theirs, holds of our arenas, too (Memory, above)",
    "MOCCASIN layered graphs of 500 and 1000 nodes": "the search, which is for networks that run almost in a"
    " line, is far from theirs at 250 nodes already, and takes longer than minutes for more",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of search, on the nominal machine")
    parser.add_argument("--moccasin", type=Path, help="folder with the graphs of its authors")
    parser.add_argument("--only", default="", help="comma-separated; default: what takes minutes")
    arguments = parser.parse_args()
    experiments = experiments_of(arguments.seconds, arguments.moccasin)
    lengthy = {f"moccasin-{each.nodes}" for each in moccasin.INSTANCES if each.nodes > MOST_NODES}
    names = arguments.only.split(",") if arguments.only else [n for n in experiments if n not in lengthy]
    if unknown := [name for name in names if name not in experiments]:
        parser.error(f"no experiment {', '.join(unknown)}: there are {', '.join(experiments)}")
    rows: list[Row] = []
    for name in names:
        for row in experiments[name]():
            print(row, flush=True)
            rows.append(row)
    known = recorded() if arguments.only else []
    print("written to", write_result("published", merged(known, rows)))
    return 0


def experiments_of(seconds: float, graphs: Path | None) -> dict[str, Callable[[], Iterable[Row]]]:
    """What can be repeated, by name."""
    return {
        "flexgen": partial(flexgen.rows, seconds),
        **{f"checkmate-{name}": partial(checkmate.rows, name, seconds) for name in checkmate.NETWORKS},
        **{
            f"moccasin-{each.nodes}": partial(moccasin.rows, each.nodes, seconds, graphs)
            for each in moccasin.INSTANCES
        },
    }


def recorded() -> list[Row]:
    path = RESULTS / "published.json"
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def merged(known: Iterable[Row], rows: Iterable[Row]) -> list[Row]:
    """Rows that are known, replaced by new ones of the same experiment; behind them what is not repeated."""
    found = {row["experiment"]: row for row in (*known, *rows) if "not_repeated" not in row}
    missing = [{"experiment": name, "not_repeated": reason} for name, reason in NOT_REPEATED.items()]
    return [*found.values(), *missing]


if __name__ == "__main__":
    sys.exit(main())
