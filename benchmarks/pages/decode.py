"""Language models in int4, of benchmarks/decode.py."""

from __future__ import annotations

from typing import Any

from common import RESULTS

from pages.results import read

OURS = "hybridc"


def decode_tables() -> list[str]:
    """Tokens of a decoder with int4 weights beside the peers, if they were measured."""
    if not (RESULTS / "decode.json").exists():
        return []
    result = read("decode")
    rows = [row for row in result["rows"] if "decode_ms" in row]
    engines = [OURS, *(e for e in dict.fromkeys(row["engine"] for row in rows) if e != OURS)]
    tokens, prompts = (" | ".join(f"{e}, {what}, ms" for e in engines) for what in ("a token", "prompt"))
    lines = [
        f"| arithmetic | context | threads | {tokens} | fastest peer over hybridc | {prompts} |",
        "|---" * (4 + 2 * len(engines)) + "|",
    ]
    for point in dict.fromkeys((row["arithmetic"], row["context"], row["threads"]) for row in rows):
        found = {row["engine"]: row for row in rows if _point(row) == point}
        token, prompt = ([found[e][name] for e in engines] for name in ("decode_ms", "prefill_ms"))
        lines.append(
            f"| {' | '.join(map(str, point))} | {' | '.join(f'{ms:.1f}' for ms in token)} "
            f"| {min(token[1:]) / token[0]:.2f} | {' | '.join(f'{ms:.0f}' for ms in prompt)} |"
        )
    where = f"{result['date']}, {result['cores']} cores of an {result['processor']}"
    return [
        "## Language models",
        f"A Llama of 246 million parameters with int4 weights for `{rows[0]['target']}` ({where}, "
        "`python benchmarks/decode.py`): a token behind so many others, and a prompt of 128. `int8` rounds "
        "activations to 8 bits, as `accuracy_level` 4 allows; OpenVINO multiplies in bf16 with either.",
        "\n".join(lines),
    ]


def _point(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["arithmetic"], row["context"], row["threads"]
