"""Write the figures of README.md and docs/benchmarks.md from benchmarks/results/*.json.

    python benchmarks/readme.py [--example]

With `--example` also the README's plan table and docs/resnet50.svg, which are made by the commands they show.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import RESULTS, ROOT
from pages.decode import PEERS, decode_points, gain
from pages.plans import paired, speed
from pages.results import read
from pages.tables import tables

FIRST_ROWS = 3
"""Of the README's plan table, which shows the kernels of the CPU as well, and fits on one screen."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--example", action="store_true", help="plan ResNet-50 again")
    if parser.parse_args().example:
        replace_part(ROOT / "README.md", "example", example())
    replace_part(ROOT / "README.md", "measured", summary())
    replace_part(ROOT / "docs" / "benchmarks.md", "measured", tables())


def replace_part(path: Path, part: str, text: str) -> None:
    """Put `text` between the two comments that mark a part of a document."""
    begin, end = f"<!-- {part}: written by benchmarks/readme.py -->", f"<!-- end of {part} -->"
    before, rest = path.read_text().split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def example() -> str:
    """The plan of ResNet-50 for half the memory it needs, and the curve of time against memory."""
    options = ["--target", "cuda+avx2", "--plan-seconds", "2"]
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/resnet50.onnx"
        hybridc("models", "export", "resnet50", model)
        shown = hybridc("plan", model, *options, "--gpu-memory", "50%", "--all").splitlines()
        picture = str(ROOT / "docs" / "resnet50.svg")
        hybridc("sweep", model, *options, "--gpu-memory", "10%..100%", "-o", picture)
    kernels, placement = section(shown, "Kernels"), section(shown, "Placement")
    first = next(i for i, line in enumerate(shown) if line.startswith("Predicted run:"))
    # how long planning took is another on every computer
    summary = [line for line in shown[first:] if not line.startswith("planned in")]
    lines = [
        "hybridc plan resnet50.onnx --target cuda+avx2 --gpu-memory 50% --plan-seconds 2 --all",
        "",
        *kernels[:2],
        *shortened(kernels[2:]),
        "",
        *placement,
        "",
        *summary,
    ]
    block = "\n".join(f"    {line}".rstrip() for line in lines)
    return f"{block}\n\n![Predicted time of ResNet-50 against the GPU memory budget](docs/resnet50.svg)"


def section(shown: list[str], title: str) -> list[str]:
    """The lines of a report from a title to the next empty line."""
    begin = next(i for i, line in enumerate(shown) if line.startswith(title))
    return shown[begin : shown.index("", begin)]


def shortened(rows: list[str]) -> list[str]:
    """The first rows, and those of the CPU, with dots for what is left out."""
    kept = [i for i, row in enumerate(rows) if i < FIRST_ROWS or row.split()[1] == "cpu"]
    lines: list[str] = []
    for before, i in zip([-1, *kept], [*kept, len(rows)], strict=True):
        lines += ["   ..."] * (i > before + 1)
        lines += rows[i : i + 1]
    return lines


def hybridc(*arguments: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "hybridc.cli", *arguments]
    environment = os.environ | {"COLUMNS": "80"}  # lines of the page need no scrolling
    return subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=True).stdout


def summary() -> str:
    """One table for the README: a row for each kind of claim."""
    accuracy, memory, plans = (read(name) for name in ("accuracy", "memory", "plans"))
    rows, (estimated, peaks) = accuracy["rows"], paired(plans["rows"])
    kept = sum(r["budget_bytes"] is None or r["allocated_bytes"] <= r["budget_bytes"] for r in rows)
    worst = max(row["max_rel_error"] for row in rows)
    ours = max(row["ratio"] for row in memory["rows"] if "planner" not in row)
    theirs = [row["ratio"] for row in memory["rows"] if "planner" in row]
    lines = [
        "| what | result | compared with | measured |",
        "|---|---|---|---|",
        f"| budgets kept, results right (emulated GPU) | {kept} of {len(rows)} runs, largest relative error "
        f"{worst:.0e} | ONNX Runtime | {accuracy['date']} |",
        f"| arena over the live-bytes lower bound | at most {ours:.3f} | TVM's planner: {min(theirs):.2f} to "
        f"{max(theirs):.2f} | {memory['date']} |",
        "| predicted plans at 25 % of the memory, kernels as estimated, with contention (at the data sheet's "
        f"peaks) | {speed(estimated, 0.25):.2f} times faster ({speed(peaks, 0.25):.2f}) "
        f"| best of layer split, offloading, CPU | {plans['date']} |",
    ]
    for isa in ("avx512", "avx2"):
        result = read(f"cpu_{isa}")
        networks = [row for row in result["rows"] if row["table"] == "models"]
        ratios = next(row for row in result["rows"] if row["table"] == "summary")
        peers = [engine for engine in networks[0]["ms"] if engine != "hybridc"]
        lines.append(
            f"| {len(networks)} networks on the CPU, `{isa}` | {ratios['geometric_mean']:.2f} times faster "
            f"(least {ratios['worst']:.2f}) | {peer_names(peers)} | {result['date']} |"
        )
    conv1d = read("conv1d_avx512")
    forward = next(r for r in conv1d["rows"] if r["table"] == "summary" and r["operation"] == "forward")
    ratio = forward["ratios"]["torch"]
    lines.append(
        f"| {forward['points']} dilated 1-D convolutions, `avx512` | {ratio['geometric_mean']:.1f} times "
        f"faster (least {ratio['least']:.2f}) | PyTorch (oneDNN) | {conv1d['date']} |"
    )
    training = read("training_speed")
    speeds = [row["speed"] for row in training["rows"] if row["model"] != "digits"]
    lines.append(
        f"| {len(speeds)} training steps on the CPU | {min(speeds):.1f} to {max(speeds):.0f} times faster "
        f"| PyTorch | {training['date']} |"
    )
    for path in sorted(RESULTS.glob("decode_*.json")):
        decode, target = read(path.stem), path.stem.removeprefix("decode_")
        points = decode_points(decode["rows"])
        gains = [gain(point.tokens) for point in points]
        peers = peer_names([peer for peer in PEERS if any(peer in point.tokens for point in points)])
        lines.append(
            f"| tokens of an int4 decoder on the CPU, `{target}`, {len(gains)} points "
            f"| {min(gains):.1f} to {max(gains):.1f} times faster | {peers} | {decode['date']} |"
        )
    return "\n".join(lines)


def peer_names(peers: list[str]) -> str:
    *others, last = dict.fromkeys(PEERS.get(peer, peer) for peer in peers)
    if not others:
        return last
    return f"the {'fastest' if len(others) > 1 else 'faster'} of {', '.join(others)} and {last}"


if __name__ == "__main__":
    main()
