"""The table of networks that are drawn at random."""

from __future__ import annotations

from typing import Any

from common import RESULTS

from pages.results import read

FAMILIES = {
    "networks": "image networks of timm, any architecture",
    "recurrent": "LSTM and GRU layers, batch 1 and 16",
    "attention": "transformers over 1,000 to 2,000 positions",
    "speech": "speech encoders",
    "depthwise": "7x7 depthwise convolutions, layer norm, GELU",
    "quantized": "int8 networks (for `avx512` by VNNI)",
    "operators": "single operators: products, convolutions, attention, TopK, prefix sums, layer norm",
}
"""What `benchmarks/cpu.py --drawn` draws, for readers."""


def drawn_tables() -> list[str]:
    """A row for each family and instruction set that was measured."""
    lines = []
    for isa in ("amx", "avx512", "avx2_vnni", "avx2"):
        for family, what in FAMILIES.items():
            if not (RESULTS / f"cpu_{isa}_{family}.json").exists():
                continue
            record = read(f"cpu_{isa}_{family}")
            rows = record["rows"]
            summary, drawn = (next(r for r in rows if r["table"] == kind) for kind in ("summary", "drawn"))
            count = sum(row["table"] == "models" for row in rows)
            lines.append(
                f"| {what} | `{isa}` | {count} (seed {drawn['seed']}) | {summary['geometric_mean']:.2f} | "
                f"{summary['worst']:.2f} | {_peers(rows)} | {record['date']}, {record['processor']} |"
            )
    if not lines:
        return []
    head = [
        "| networks | target | drawn | faster peer over hybridc | worst | peers | measured |",
        "|---" * 7 + "|",
    ]
    words = (
        "Networks drawn at random, two threads, against the faster peer (OpenVINO is held to the target's "
        "instructions; ONNX Runtime, which cannot be, is a peer for vectors of 256 bits only on a processor "
        "without AVX-512):"
    )
    return [words, "\n".join([*head, *lines])]


def _peers(rows: list[dict[str, Any]]) -> str:
    """Engines that networks were compared with."""
    engines = next(row["ms"] for row in rows if row["table"] == "models")
    return ", ".join(engine for engine in engines if engine != "hybridc")
