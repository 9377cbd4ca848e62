"""Language models in int4, of benchmarks/decode.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common import RESULTS

from pages.results import read

OURS = "hybridc"
PEERS = {
    "onnxruntime": "ONNX Runtime",
    "genai": "onnxruntime-genai",
    "openvino": "OpenVINO",
    "llama.cpp Q4_0": "llama.cpp",
    "llama.cpp Q4_K_M": "llama.cpp",
}
"""How a reader knows them."""


@dataclass(frozen=True)
class Point:
    """Milliseconds of each engine that took the file, ours first."""

    arithmetic: str
    context: int
    prompt: int
    threads: int
    tokens: dict[str, float]
    prompts: dict[str, float]
    read_share: float
    """What ours reads for a token, in its time, over what so many threads read of memory in it."""


def decode_points(rows: list[dict[str, Any]]) -> list[Point]:
    """What was measured, in its order.

    In `bf16`, peers that have no such arithmetic are those of `exact`.
    """
    found: dict[tuple[str, int, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "decode_ms" in row:
            point = row["arithmetic"], row["context"], row["prompt"], row["threads"]
            found.setdefault(point, {})[row["engine"]] = row
    points = []
    for point, of_engine in found.items():
        if OURS not in of_engine:
            continue
        if point[0] == "bf16":
            of_engine = {**found["exact", *point[1:]], **of_engine}
        engines = [engine for engine in (OURS, *PEERS) if engine in of_engine]
        tokens, prompts = ({e: of_engine[e][name] for e in engines} for name in ("decode_ms", "prefill_ms"))
        points.append(Point(*point, tokens, prompts, of_engine[OURS]["read_share"]))
    return points


def gain(ms: dict[str, float]) -> float:
    """How many times as long as ours the fastest peer takes."""
    return min(own for engine, own in ms.items() if engine != OURS) / ms[OURS]


def decode_tables() -> list[str]:
    """Tokens of a decoder with int4 weights beside the peers, if they were measured."""
    names = sorted(path.stem for path in RESULTS.glob("decode_*.json"))
    tables = [part for name in names for part in _tables(read(name))]
    if not tables:
        return []
    intro = (
        "A Llama of 246 million parameters with int4 weights (`python benchmarks/decode.py`): a token behind "
        "so many others, and a prompt of so many, milliseconds. `int8` rounds activations to 8 bits, as "
        "`accuracy_level` 4 of the file allows, `exact` is float32, `bf16` is `--precision bf16`. Tables of "
        f"before {_TOLD_SINCE} have OpenVINO as it is: it rounds activations to 8 bits, or to bf16, whatever "
        "the file says, so that its rows beside `exact` are not of that arithmetic; since then its options "
        "say which. ONNX Runtime has no bf16: its rows are those of `exact`. llama.cpp has the same codes as "
        "Q4_0, and those again as Q4_K_M, and always rounds to 8 bits. Of the read bandwidth: what a token "
        "of hybridc has to read, weights, keys and values, in its time, over what as many threads read of "
        "memory."
    )
    return ["## Language models", intro, *tables]


_TOLD_SINCE = "2026-11-30"


def _tables(result: dict[str, Any]) -> list[str]:
    points = decode_points(result["rows"])
    engines = [e for e in (OURS, *PEERS) if any(e in point.tokens for point in points)]
    target = next(row["target"] for row in result["rows"] if row["engine"] == OURS)
    where = f"{result['date']}, {result['cores']} cores of an {result['processor']}"
    named = ["arithmetic", "context", "threads"]
    token = [[*_cells(point, point.tokens, engines), f"{point.read_share:.0%}"] for point in points]
    prompt = [[*_cells(point, point.prompts, engines), str(point.prompt)] for point in points]
    columns = [*named, *engines, "fastest peer over hybridc"]
    return [
        f"`{target}`, a token, {where}:",
        _markdown([*columns, "of the read bandwidth"], token),
        f"`{target}`, a prompt:",
        _markdown([*columns, "tokens"], prompt),
    ]


def _cells(point: Point, ms: dict[str, float], engines: list[str]) -> list[str]:
    times = [f"{ms[engine]:.1f}" if engine in ms else "" for engine in engines]
    return [point.arithmetic, str(point.context), str(point.threads), *times, f"{gain(ms):.2f}"]


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        f"| {' | '.join(line)} |" if line[0] != "---" else "|---" * len(line) + "|" for line in lines
    )
