"""Requests to a server, of benchmarks/serve.py."""

from __future__ import annotations

from common import RESULTS

from pages.results import read


def serve_tables() -> list[str]:
    """Latencies that clients see, if they were measured."""
    if not (RESULTS / "serve.json").exists():
        return []
    result = read("serve")
    rows, first = result["rows"], result["rows"][0]
    lines = [
        "| protocol | model run by | requests | errors | wrong results | p50 | p99 | requests in a run"
        " | memory after warm-up, at the end |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        memory = f"{row['resident_mib_before']:.1f}, {row['resident_mib_after']:.1f} MiB"
        lines.append(
            f"| {row['protocol']} | {row['server']} | {row['requests']:,} | {row['errors']}"
            f" | {row['wrong_results']} | {row['p50_ms']:.1f} ms | {row['p99_ms']:.1f} ms"
            f" | {row['requests_per_run']:.1f} | {memory} |"
        )
    return [
        "## Serving",
        f"{first['model']} for `{first['target']}`, asked by {first['clients']} clients of tritonclient, and"
        " onnxruntime behind the same server, in turns. Clients, which are threads of one Python process, and"
        f" servers share {result['cores']} cores of an {result['processor']} ({result['date']}), so a latency"
        " is not that of the model alone.",
        "\n".join(lines),
    ]
