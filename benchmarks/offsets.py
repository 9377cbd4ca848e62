"""Packing blocks with known lifetimes into a capacity: MiniMalloc's eleven hard instances, or others.

    python benchmarks/offsets.py [NAME.CAPACITY.csv ...]

Exits with 1 if a packing exceeds its capacity. The first call on a machine builds the search, which
takes some seconds and is not counted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from common import write_result

from hybridc.passes.planner.emit.offsets import MemoryBlock, live_bound, pack
from tests.support.minimalloc import capacity_bytes, instance_files, read_blocks


def main(arguments: list[str]) -> int:
    files = [Path(argument) for argument in arguments] or instance_files()
    pack(read_blocks(instance_files()[0]))
    rows = [measure(path) for path in files]
    if not arguments:
        print("written to", write_result("offsets", rows))
    return 0 if all(row["bytes"] <= row["capacity_bytes"] for row in rows) else 1


def measure(path: Path) -> dict[str, Any]:
    blocks, capacity = read_blocks(path), capacity_bytes(path)
    start = time.perf_counter()
    offsets = pack(blocks, capacity)
    seconds = time.perf_counter() - start
    check_disjoint(blocks, offsets)
    row = {
        "instance": path.name,
        "blocks": len(blocks),
        "bytes": max((o + b.size_bytes for o, b in zip(offsets, blocks, strict=True)), default=0),
        "lower_bound_bytes": live_bound(blocks),
        "capacity_bytes": capacity,
        "seconds": round(seconds, 3),
    }
    print(row, flush=True)
    return row


def check_disjoint(blocks: list[MemoryBlock], offsets: tuple[int, ...]) -> None:
    """Raises AssertionError if blocks that are live together share a byte."""
    placed = list(zip(blocks, offsets, strict=True))
    for i, (one, low) in enumerate(placed):
        for other, high in placed[:i]:
            together = one.first <= other.last and other.first <= one.last
            apart = low + one.size_bytes <= high or high + other.size_bytes <= low
            assert not together or apart, (one, other)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
