"""Language models in int4, of benchmarks/decode.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common import RESULTS

from pages.results import read

OURS = "hybridc"


@dataclass(frozen=True)
class Point:
    """Milliseconds of each engine, ours first."""

    arithmetic: str
    context: int
    prompt: int
    threads: int
    engines: tuple[str, ...]
    tokens: tuple[float, ...]
    prompts: tuple[float, ...]
    read_share: float
    """What ours reads for a token, in its time, over what so many threads read of memory in it."""


def decode_points(rows: list[dict[str, Any]]) -> list[Point]:
    """What was measured, in its order, without engines that did not take the file.

    The file of `bf16` is that of `exact`, whose peers count.
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
            of_engine = {**found["exact", *point[1:]], OURS: of_engine[OURS]}
        engines = (OURS, *(e for e in of_engine if e != OURS))
        ms = [tuple(of_engine[e][name] for e in engines) for name in ("decode_ms", "prefill_ms")]
        points.append(Point(*point, engines, *ms, of_engine[OURS]["read_share"]))
    return points


def decode_tables() -> list[str]:
    """Tokens of a decoder with int4 weights beside the peers, if they were measured."""
    names = sorted(path.stem for path in RESULTS.glob("decode_*.json"))
    tables = [part for name in names for part in _table(read(name))]
    if not tables:
        return []
    intro = (
        "A Llama of 246 million parameters with int4 weights (`python benchmarks/decode.py`): a token behind "
        "so many others, and a prompt of so many. `int8` rounds activations to 8 bits, as `accuracy_level` 4 "
        "allows; OpenVINO takes no note of it, and multiplies in bf16 where the processor can. `bf16` is "
        "`exact` with `--precision bf16`. Of the read bandwidth: what a token of hybridc has to read, "
        "weights, keys and values, in its time, over what as many threads read of memory."
    )
    return ["## Language models", intro, *tables]


def _table(result: dict[str, Any]) -> list[str]:
    points = decode_points(result["rows"])
    engines = points[0].engines
    token, prompt = (" | ".join(f"{e}, {what}, ms" for e in engines) for what in ("a token", "a prompt"))
    lines = [
        f"| arithmetic | context | threads | {token} | fastest peer over hybridc | of the read bandwidth "
        f"| prompt | {prompt} |",
        "|---" * (6 + 2 * len(engines)) + "|",
    ]
    for point in points:
        tokens, prompts = (" | ".join(f"{ms:.1f}" for ms in each) for each in (point.tokens, point.prompts))
        ratio = min(point.tokens[1:]) / point.tokens[0]
        lines.append(
            f"| {point.arithmetic} | {point.context} | {point.threads} | {tokens} | {ratio:.2f} "
            f"| {point.read_share:.0%} | {point.prompt} | {prompts} |"
        )
    target = next(row["target"] for row in result["rows"] if row["engine"] == OURS)
    where = f"{result['date']}, {result['cores']} cores of an {result['processor']}"
    return [f"`{target}`, {where}:", "\n".join(lines)]
