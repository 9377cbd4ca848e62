"""The instances of MiniMalloc's benchmark set; tests/data/minimalloc/NOTICE says whose they are."""

from __future__ import annotations

import csv
from pathlib import Path

from hybridc.passes.planner.emit.offsets import MemoryBlock

FOLDER = Path(__file__).parent.parent / "data" / "minimalloc"


def instance_files() -> list[Path]:
    return sorted(FOLDER.glob("*.csv"))


def capacity_bytes(path: Path) -> int:
    """From the name, NAME.CAPACITY.csv. Raises ValueError if it has none."""
    capacity = path.stem.rpartition(".")[2]
    if not capacity.isdecimal():
        raise ValueError(f"{path}: the name does not say the capacity, as in A.1048576.csv")
    return int(capacity)


def read_blocks(path: Path) -> list[MemoryBlock]:
    """Columns id, lower, upper, size: live from step `lower` on, no longer at step `upper`."""
    with path.open(newline="") as file:
        return [
            MemoryBlock(int(r["size"]), int(r["lower"]), int(r["upper"]) - 1) for r in csv.DictReader(file)
        ]
