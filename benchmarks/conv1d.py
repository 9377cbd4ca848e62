"""Dilated convolutions along one axis, forward and backward, against oneDNN in PyTorch and in OpenVINO.

    python benchmarks/conv1d.py [--isa avx512|avx2|avx512_bf16|amx] [--points 60] [--seconds 0.1] [--rounds 3]

The points are a sample of the grid of Chaudhary et al., "Efficient and Generic 1D Dilated Convolution Layer
for Deep Learning" (2021), in float32, with one image: channels C and filters K of {1, 4, 8, 10, 15, 16, 32,
64}, filter widths S from 1 to 51 (odd), dilations d of {1, 2, 4, 8, 16} and output widths Q of {1000, 2000,
5000, 10000, 20000, 60000}. The first is the AtacWorks layer (C = K = 15, S = 51, d = 8, Q = 60000); the
others are drawn by Python's generator with seed 0, each value by itself.

Each engine is a process of its own, which sleeps while another one works; in every round all engines compute
an operation of a point, each for some time, on arguments that no cache holds. Figures are medians over all
rounds. A share of peak counts the 2 C K S Q operations of the sums as they are defined, whatever algorithm a
kernel uses: Fourier transforms reach more than 100 %. Rows say which rule made the kernel, and what direct
sums, by the rules that are left when fast algorithms are off, reach. Peak is measured beside each kernel.

For `avx512_bf16` and `amx` only the forward operation is measured: our kernels read and write float32 and
pack bf16 themselves, PyTorch gets bf16 tensors, OpenVINO float32 tensors and the hint to compute in bf16;
`fp32` are our direct sums in float32. Peak is that of float32 there, too.

Writes benchmarks/results/conv1d_ISA.json, which names peers that are not installed, and a picture beside it.
Let nothing else run on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from common import write_result
from conv1d.engines import FAST
from conv1d.plot import ratios_to_svg

from hybridc.targets import ISAS, available_threads, native_isa

CHANNELS = (1, 4, 8, 10, 15, 16, 32, 64)
WIDTHS = tuple(range(1, 52, 2))
DILATIONS = (1, 2, 4, 8, 16)
OUTPUTS = (1000, 2000, 5000, 10000, 20000, 60000)
WIDE_CHANNELS = 15
"""From as many channels and filters on, shares of peak are summed up."""
OPERATIONS = ("forward", "backward_data", "backward_weight")
PEERS = {"forward": ("torch", "openvino"), "backward_data": ("torch",), "backward_weight": ("torch",)}
FLOATS = {"avx512_bf16": "avx512", "amx": "avx512"}
"""Of an instruction set for bf16, that of our direct sums in float32, which stand beside it."""
LIMITS = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}
"""Environment that holds the peers to an instruction set."""
FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution of the grid; the data has `outputs + (width - 1) * dilation` samples and no padding."""

    channels: int
    filters: int
    width: int
    dilation: int
    outputs: int

    @property
    def flops(self) -> int:
        return 2 * self.channels * self.filters * self.width * self.outputs


ATACWORKS = Shape(15, 15, 51, 8, 60000)


def main() -> int:
    arguments = _arguments()
    rows: list[dict[str, Any]] = []
    for row in measured(sample(arguments.points), arguments):
        print(json.dumps(row), flush=True)
        rows.append(row)
    rows += summary(rows)
    print(table(rows))
    rows += [{"table": "missing", "engine": engine} for engine in missing_peers()]
    path = write_result(f"conv1d_{arguments.isa}", rows)
    path.with_suffix(".svg").write_text(ratios_to_svg([row for row in rows if row["table"] == "points"]))
    print("written to", path)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    native = "avx2" if native_isa().vector_bits == ISAS["avx2"].vector_bits else "avx512"
    parser.add_argument("--isa", choices=LIMITS, default=native)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.1, help="of one engine in one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_threads())
    return parser.parse_args()


def sample(count: int) -> list[Shape]:
    """The AtacWorks layer, and as many draws as are asked for beside it."""
    draw = random.Random(0).choice
    drawn = [
        Shape(draw(CHANNELS), draw(CHANNELS), draw(WIDTHS), draw(DILATIONS), draw(OUTPUTS))
        for _ in range(count - 1)
    ]
    return [ATACWORKS, *drawn]


# ------------------------------------------------------------------------------------------ measuring


class Worker:
    """An engine in a process of its own: answers one request, a line of JSON, with another."""

    def __init__(self, engine: str, isa: str, threads: int) -> None:
        """`fp32` is hybridc for the float32 instructions of an instruction set for bf16."""
        if engine == "fp32":
            engine, isa = "hybridc", FLOATS[isa]
        limits = {} if engine == "hybridc" else LIMITS[isa]
        self._process = subprocess.Popen(
            [sys.executable, str(FOLDER / "conv1d" / "engines.py"), engine, isa, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **limits},
        )

    def ask(self, **request: Any) -> Any:
        """Raises RuntimeError if the engine failed, which has written why to stderr."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine failed at {request}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def operations_of(isa: str) -> tuple[str, ...]:
    return OPERATIONS[:1] if isa in FLOATS else OPERATIONS


def missing_peers() -> tuple[str, ...]:
    """Those that are not installed: they are left out."""
    return tuple(peer for peer in PEERS["forward"] if importlib.util.find_spec(peer) is None)


def peers_of(isa: str, operation: str) -> tuple[str, ...]:
    peers = tuple(peer for peer in PEERS[operation] if peer not in missing_peers())
    return (*peers, "fp32") if isa in FLOATS else peers


def measured(shapes: Sequence[Shape], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each operation of each shape. All kernels are compiled before any is timed."""
    isa, operations = arguments.isa, operations_of(arguments.isa)
    engines = ("hybridc", *peers_of(isa, "forward"))
    workers = {engine: Worker(engine, isa, arguments.threads) for engine in engines}
    try:
        for shape in shapes:
            for worker in workers.values():
                worker.ask(prepare=astuple(shape), operations=operations)
        for shape in shapes:
            for operation in operations:
                yield _row(workers, shape, operation, arguments)
    finally:
        for worker in workers.values():
            worker.close()


def _row(
    workers: dict[str, Worker], shape: Shape, operation: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    asked = {"shape": astuple(shape), "operation": operation, "seconds": arguments.seconds}
    peers = peers_of(arguments.isa, operation)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in ("hybridc", "direct", *peers)}
    for _ in range(arguments.rounds):
        answers["hybridc"].append(own := workers["hybridc"].ask(**asked, direct=False))
        is_fast = own["rule"].startswith(FAST)
        answers["direct"].append(workers["hybridc"].ask(**asked, direct=True) if is_fast else own)
        for peer in peers:
            answers[peer].append(workers[peer].ask(**asked, direct=True))
    ms = {
        name: statistics.median(t for answer in own for t in answer["times_ms"])
        for name, own in answers.items()
    }
    peak = statistics.median(answer["peak_gflops"] for answer in answers["hybridc"])
    return {
        "table": "points",
        "operation": operation,
        **{name: getattr(shape, name) for name in Shape.__slots__},
        "rule": answers["hybridc"][0]["rule"],
        "direct_rule": answers["direct"][0]["rule"],
        "ms": {name: round(value, 4) for name, value in ms.items()},
        "percent_of_peak": round(100 * shape.flops / ms["hybridc"] / 1e6 / peak, 1),
        "direct_percent_of_peak": round(100 * shape.flops / ms["direct"] / 1e6 / peak, 1),
        "peak_gflops": round(peak, 1),
        "ratios": {peer: round(ms[peer] / ms["hybridc"], 3) for peer in peers},
        "direct_ratios": {peer: round(ms[peer] / ms["direct"], 3) for peer in peers},
    }


# -------------------------------------------------------------------------------------------- summary


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each operation: what the AtacWorks layer reaches, medians for wide layers, and ratios."""
    lines = []
    for operation in dict.fromkeys(row["operation"] for row in rows):
        own = [row for row in rows if row["operation"] == operation]
        wide = [row for row in own if min(row["channels"], row["filters"]) >= WIDE_CHANNELS]
        lines.append({
            "table": "summary",
            "operation": operation,
            "points": len(own),
            "atacworks_percent_of_peak": own[0]["percent_of_peak"],
            "atacworks_direct_percent_of_peak": own[0]["direct_percent_of_peak"],
            "wide_points": len(wide),
            "wide_median_percent_of_peak": _median(wide, "percent_of_peak"),
            "wide_median_direct_percent_of_peak": _median(wide, "direct_percent_of_peak"),
            "atacworks_direct_ratios": own[0]["direct_ratios"],
            **{
                kind: {peer: _ratios([row[kind][peer] for row in own]) for peer in own[0][kind]}
                for kind in ("ratios", "direct_ratios")
            },
        })  # fmt: skip
    return lines


def _median(rows: Sequence[dict[str, Any]], field: str) -> float:
    return round(statistics.median(row[field] for row in rows), 1)


def _ratios(values: Sequence[float]) -> dict[str, float]:
    mean = math.exp(statistics.fmean(map(math.log, values)))
    return {
        "geometric_mean": round(mean, 3),
        "least": min(values),
        "below_one": sum(value < 1 for value in values),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = []
    for row in rows:
        if row["table"] == "summary":
            lines.append(json.dumps(row))
            continue
        shape = " ".join(f"{name[0]}={row[name]}" for name in Shape.__slots__)
        ratios = "  ".join(f"{peer} {ratio:6.2f}" for peer, ratio in row["ratios"].items())
        lines.append(
            f"{row['operation']:16} {shape:32} {row['ms']['hybridc']:9.4f} ms {row['percent_of_peak']:6.1f} %"
            f" (direct {row['direct_percent_of_peak']:5.1f} %)  {ratios}  [{row['rule']}]"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
