"""Estimated time of a CUDA kernel, from its machine code: no GPU is needed.

    python benchmarks/gpu_model.py --source F.cu --kernel NAME --grid X,Y,Z --block X,Y,Z --arch sm_86 \\
        --gpu "RTX 3090" --buffer BYTES...
    python benchmarks/gpu_model.py --validate --kernels DIR
    python benchmarks/gpu_model.py --suite resnet50,bert@fp16 --gpu "RTX 3090"
    python benchmarks/gpu_model.py --against CHECKOUT [--networks bert,bert@fp16 --gpus "RTX 3090,GTX 1650"]
    python benchmarks/gpu_model.py --gates
    python benchmarks/gpu_model.py --gates memory,resnet50
    python benchmarks/gpu_model.py --layouts resnet50,resnet50@fp16 [--gpu "RTX 3090"]

The first prints JSON for a kernel that anybody wrote in CUDA C++. The kernel's parameters are the buffers in
their order, if it has no others; else give all of them by --arguments: numbers as they are, a buffer as `b`
and its bytes. The second compares estimates with published times of two ladders of kernels, which DIR holds
(gpu_model/ladders.py says where they are from), and writes `results/gpu_model.json`. The third prices every
kernel of a network that hybridc would run on that GPU, by the estimate and by its closed form, and notes
that in `results/gpu_model_suite.json`. The fourth compiles networks by the code of a checkout of commit
51b395f, too, whose kernels the model prices as it does today's, and notes both in
`results/gpu_model_against.json`.

The others count, for GPUs of sm_75, sm_80 and sm_86, what is judged without times: spilled registers, tensor
cores, widths of loads, bank conflicts, sectors, waves. They print it for each rule, and end with 1 where a
threshold (gpu_model/gates.py) is missed for which gpu_model/exceptions.py gives no reason. The first takes
all of the suite, and notes each kernel in `results/gpu_gates.json`. The last estimates networks as they are
compiled with planes alone, and with channels last where that is estimated to gain (gpu_model/layouts.py), and
notes that in `results/gpu_model_layouts.json`.

Needs `nvdisasm` (the extra `bench`) and g++. Times are estimates: docs/benchmarks.md says how far off they
are where that is known.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import result_rows, write_result
from gpu_model.compile import cubin_of

from hybridc.errors import HybridcError, UsageError
from hybridc.gpu_model.estimate import estimate
from hybridc.gpu_model.kernel import Argument, Buffer, call, find_kernel, kernels_of
from hybridc.machine import Processor, gpu_named


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_mutually_exclusive_group(required=True)
    actions.add_argument("--source", type=Path, help="file of CUDA C++")
    actions.add_argument("--validate", nargs="*", metavar="LADDER", help="all, or those of these names")
    actions.add_argument("--suite", metavar="NETWORK[:BATCH][@fp16],...")
    actions.add_argument("--against", type=Path, metavar="CHECKOUT", help="of commit 51b395f")
    actions.add_argument("--gates", nargs="?", const="", metavar="NETWORK[:BATCH][@fp16],...")
    actions.add_argument("--layouts", metavar="NETWORK[:BATCH][@fp16],...")
    parser.add_argument("--kernel", help="its name, or a part of the mangled one")
    parser.add_argument("--grid", type=_three, help="blocks along x, y and z")
    parser.add_argument("--block", type=_three, help="threads along x, y and z")
    parser.add_argument("--arch", help="compile for this architecture (default: that of the GPU)")
    parser.add_argument("--gpu", default="rtx-3090", help="name of a GPU or of a machine profile")
    parser.add_argument("--networks", default="resnet50,vgg16,bert,vit_b16,unet", help="of --against")
    parser.add_argument("--gpus", default="RTX 3090,GTX 1650", metavar="GPU,...", help="of --against")
    parser.add_argument("--buffer", nargs="*", type=int, default=[], metavar="BYTES")
    parser.add_argument("--arguments", nargs="*", metavar="NUMBER|bBYTES", help="in place of --buffer")
    parser.add_argument("--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory")
    parser.add_argument("--include", nargs="*", type=Path, default=[], metavar="DIR")
    parser.add_argument("--kernels", type=Path, default=Path("kernels"), metavar="DIR")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        _run(arguments)
    except HybridcError as error:
        parser.exit(error.exit_code, f"{error}\n")


def _run(arguments: argparse.Namespace) -> None:
    if arguments.validate is not None:
        _validate(arguments.kernels, arguments.validate)
    elif arguments.suite:
        _price(arguments.suite.split(","), gpu_named(arguments.gpu))
    elif arguments.layouts:
        _lay_out(arguments.layouts.split(","), gpu_named(arguments.gpu))
    elif arguments.against is not None:
        _compare(arguments.against, arguments.networks.split(","), arguments.gpus.split(","))
    elif arguments.gates is not None:
        missed = _judge(arguments.gates.split(",") if arguments.gates else [])
        if missed:
            raise SystemExit("\n".join(missed))
    else:
        for name in ("kernel", "grid", "block"):
            if getattr(arguments, name) is None:
                raise UsageError("HC500", f"--source needs --{name}")
        print(json.dumps(_estimated(arguments), indent=1))


def _estimated(arguments: argparse.Namespace) -> dict[str, Any]:
    processor = gpu_named(arguments.gpu)
    architecture = arguments.arch or (processor.chip.architecture if processor.chip else "sm_86")
    cubin = cubin_of(
        arguments.source.read_text(), architecture, [arguments.source.parent, *arguments.include]
    )
    kernel = find_kernel(kernels_of(cubin), arguments.kernel)
    texts = arguments.arguments or [f"b{size}" for size in arguments.buffer]
    launch = call(kernel, arguments.grid, arguments.block, _arguments(texts), arguments.shared)
    result = estimate(launch, processor)
    found, counters = asdict(result), result.counters
    per_block = found.pop("counters")
    return {
        "kernel": kernel.name,
        "gpu": processor.name,
        "registers": kernel.resources.registers,
        "shared_bytes": launch.shared_bytes,
        "local_bytes": kernel.resources.local_bytes,
        **{name: _rounded(value) for name, value in found.items()},
        "per_block": {name: _rounded(value) for name, value in per_block.items()},
        "sectors_over_least": _rounded(counters.sector_ratio),
        "bank_conflict_factor": _rounded(counters.bank_conflict_factor),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def _arguments(texts: Sequence[str]) -> list[Argument]:
    found: list[Argument] = []
    for text in texts:
        try:
            if text.startswith("b"):
                found.append(Buffer(int(text[1:])))
            else:
                found.append(int(text) if text.lstrip("-").isdigit() else float(text))
        except ValueError:
            raise UsageError("HC513", f"{text!r} is neither a number nor b and a number of bytes") from None
    return found


def _three(text: str) -> tuple[int, int, int]:
    numbers = [int(part) for part in text.split(",")]
    if not 1 <= len(numbers) <= 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not up to three positive numbers")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _price(networks: Sequence[str], processor: Processor) -> None:
    """Rows of the same network on the same GPU replace those that the result has."""
    from gpu_model.suite import suite_rows

    for network in networks:
        rows = []
        for row in suite_rows(network, processor):
            print(json.dumps(row), flush=True)
            rows.append(row)
        key = rows[-1]["network"], processor.name
        others = [r for r in result_rows("gpu_model_suite") if (r["network"], r["gpu"]) != key]
        write_result("gpu_model_suite", [*others, *rows])


def _lay_out(networks: Sequence[str], processor: Processor) -> None:
    """Rows of the same network on the same GPU replace those that the result has."""
    from gpu_model.layouts import layout_row

    for network in networks:
        row = layout_row(network, processor)
        print(json.dumps(row), flush=True)
        key = network, processor.name
        others = [r for r in result_rows("gpu_model_layouts") if (r["network"], r["gpu"]) != key]
        write_result("gpu_model_layouts", [*others, row])


def _compare(checkout: Path, networks: Sequence[str], gpus: Sequence[str]) -> None:
    """Rows of the same network on the same GPU replace those that the result has."""
    from gpu_model.against import compared
    from pages.gpu_model import mean_times_better

    for row in compared(networks, checkout, [gpu_named(name) for name in gpus]):
        print(json.dumps(row), flush=True)
        key = row["network"], row["gpu"]
        others = [r for r in result_rows("gpu_model_against") if (r["network"], r["gpu"]) != key]
        write_result("gpu_model_against", [*others, row])
    for (gpu, precision), times in mean_times_better(result_rows("gpu_model_against")).items():
        one_by_one, graph = times
        print(f"{gpu}, {precision}: {one_by_one:.2f} times better, {graph:.2f} as a graph, geometric means")


def _judge(networks: Sequence[str]) -> list[str]:
    """What the kernels of the networks miss; of none, that of all of the suite, which is recorded."""
    from gpu_model.gates import SUITE, failures, gate_rows, needless_exceptions, summaries, table

    rows = []
    for network in networks or SUITE:
        rows += list(gate_rows(network))
        print(f"{network}: {sum(row['network'] == network for row in rows)} kernels", flush=True)
    judged = summaries(rows)
    print(table(judged))
    missed = [sentence for row in judged for sentence in failures(row)]
    if not networks:
        write_result("gpu_gates", [*judged, *rows])
        missed += [f"{rule} needs no exception from {name}" for rule, name in needless_exceptions(judged)]
    return missed


def _validate(folder: Path, names: Sequence[str]) -> None:
    """Rows of ladders that are not asked for stay as they were."""
    from gpu_model.ladders import ladders, validate

    rows = []
    for row in validate(folder, names):
        print(json.dumps(row), flush=True)
        rows.append(row)
    fresh = {ladder["set"] for ladder in ladders(names)}
    known = {ladder["set"] for ladder in ladders(())} - fresh
    others = [row for row in result_rows("gpu_model") if row["set"] in known]
    print(write_result("gpu_model", [*rows, *others]))


if __name__ == "__main__":
    main()
