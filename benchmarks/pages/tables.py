"""The tables of docs/benchmarks.md, as Markdown, from benchmarks/results/*.json."""

from __future__ import annotations

from typing import Any

from common import RESULTS

from pages.decode import decode_tables
from pages.decoder_plans import decoder_plan_tables
from pages.drawn import drawn_tables
from pages.drawn_plans import drawn_plan_tables
from pages.gpu_model import gpu_model_tables
from pages.plans import plan_tables
from pages.published import published_tables
from pages.ranges import range_tables
from pages.ranks import rank_tables
from pages.regret import regret_tables
from pages.results import read
from pages.serve import serve_tables
from pages.wheels import wheel_tables

MIB = 1 << 20


def tables() -> str:
    """The tables as Markdown."""
    floats, narrow = ("avx512", "avx2"), ("avx512_bf16", "amx")
    others = tuple(f"{isa}_{how}" for how in ("busy", "beside") for isa in floats)
    cpu, conv1d, precision = (
        [read(f"{kind}_{isa}") for isa in isas if (RESULTS / f"{kind}_{isa}.json").exists()]
        for kind, isas in (("cpu", (*floats, *others)), ("conv1d", (*floats, *narrow)), ("precision", narrow))
    )
    accuracy, memory, plans, resnet = (
        read(name) for name in ("accuracy", "memory", "plans", "resnet50_avx512")
    )
    where = f"{resnet['date']}, {resnet['cores']} cores of an {resnet['processor']}"
    [row] = resnet["rows"]
    return "\n\n".join(
        [
            "## Budgets and results",
            f"Every network within its budget and in agreement with ONNX Runtime ({accuracy['date']}; "
            "GPU emulated with exactly the budget as its memory; errors relative to the largest output):",
            accuracy_table(accuracy["rows"]),
            *wheel_tables(),
            "## Memory",
            "Bytes of the arena over the live-bytes lower bound, the largest over all targets and "
            f"budgets, and those of TVM's own planner for the same kernels ({memory['date']}):",
            memory_table(memory["rows"]),
            "## Plans",
            *plan_tables(plans),
            *drawn_plan_tables(),
            *regret_tables(),
            *published_tables(),
            *compile_time_tables(),
            "## CPU",
            f"ResNet-50 for `avx512` compiles in {row['compile_s']:.1f} s and runs in "
            f"{row['run_ms']:.0f} ms: {row['speedup_over_unscheduled']:.0f} times faster than TVM's "
            f"unscheduled pipeline ({row['tvm_unscheduled_ms']:.0f} ms), "
            f"{row['run_ms'] / row['onnxruntime_ms']:.2f} times the time of ONNX Runtime "
            f"({row['onnxruntime_ms']:.0f} ms) in the same run ({where}).",
            *(part for result in cpu for part in cpu_tables(result)),
            *drawn_tables(),
            *range_tables(),
            *(part for result in conv1d for part in conv1d_table(result)),
            *(part for result in precision for part in precision_table(result)),
            *training_tables(),
            *decode_tables(),
            *decoder_plan_tables(),
            *serve_tables(),
            *gpu_model_tables(),
        ]
    )


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| network | needs on GPU | held at 100 % | at 50 % | at 25 % | largest error |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == name]
        gpu = [row for row in of_model if row["budget_bytes"] is not None]
        held = " | ".join(
            f"{row['allocated_bytes'] / MIB:.1f} of {row['budget_bytes'] / MIB:.1f} MiB" for row in gpu
        )
        worst = max(row["max_rel_error"] for row in of_model)
        lines.append(f"| {name} | {gpu[0]['budget_bytes'] / MIB:.1f} MiB | {held} | {worst:.1e} |")
    return "\n".join(lines)


def cpu_tables(result: dict[str, Any]) -> list[str]:
    """Networks of one instruction set against the peers, and what the kernels reach of the machine."""
    isa = result["benchmark"].removeprefix("cpu_").removesuffix("_busy").removesuffix("_beside")
    beside = any(row["table"] == "beside" for row in result["rows"])
    others = next((row["processes"] for row in result["rows"] if row["table"] == "busy"), 0)
    where = f"{result['date']}, {result['cores']} cores of an {result['processor']}"
    rows = [row for row in result["rows"] if row["table"] == "models"]
    ratios, *kernels = (row for row in result["rows"] if row["table"] == "summary")
    engines = list(rows[0]["ms"])
    lines = [
        f"| network | {' | '.join(f'{engine}, ms' for engine in engines)} | faster peer over "
        f"{'hybridc_beside' if beside else 'hybridc'} |",
        "|---" * (len(engines) + 2) + "|",
    ]
    for row in rows:
        times = " | ".join(f"{row['ms'][engine]:.1f}" for engine in engines)
        lines.append(f"| {row['model']} | {times} | {row['ratio']:.2f} |")
    held = ", OpenVINO held to AVX2" if isa == "avx2" else ""
    busy = f", while {others} other processes compute" if others else ""
    what = f"Whole networks on the CPU for `{isa}`{held}{busy}"
    if beside:
        what = f"The CPU part of `cuda+{isa}`, to which all kernels are pinned, and a CPU alone"
    parts = [
        f"{what} ({where}):",
        "\n".join(lines),
        f"Geometric mean {ratios['geometric_mean']:.2f}, worst {ratios['worst']:.2f}.",
    ]
    return parts + [kernel_table(kernels)] * bool(kernels)


def kernel_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| single kernels, cold caches | | median | least |", "|---|---|---|---|"]
    for row in rows:
        limit = "of the multiply-add peak" if row["measure"] == "percent_of_peak" else "of a copy's bandwidth"
        lines.append(f"| {row['what']} | {limit} | {row['median']:.0f} % | {row['least']:.0f} % |")
    return "\n".join(lines)


def memory_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| network | hybridc | TVM StaticPlanBlockMemory |", "|---|---|---|"]
    for name in dict.fromkeys(row["model"] for row in rows):
        ours = max(row["ratio"] for row in rows if row["model"] == name and "planner" not in row)
        theirs = next(row["ratio"] for row in rows if row["model"] == name and "planner" in row)
        lines.append(f"| {name} | {ours:.3f} | {theirs:.3f} |")
    return "\n".join(lines)


def compile_time_tables() -> list[str]:
    """Seconds of compilations, if they were measured."""
    if not (RESULTS / "compile_time.json").exists():
        return []
    result = read("compile_time")
    kinds = list(dict.fromkeys(row["kind"] for row in result["rows"]))
    lines = [f"| network | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = {row["kind"]: row for row in result["rows"] if row["model"] == name}
        times = " | ".join(f"{rows[kind]['compile_s']:.1f} s" for kind in kinds)
        lines.append(f"| {name} | {times} |")
    row = result["rows"][0]
    return [
        "## Compile time",
        f"For `{row['target']}` and {row['budget']} of the memory, with a cache that is empty (cold) or "
        "holds what the same compilation left there (warm); without the start of Python, which takes "
        f"two to four seconds ({result['date']}, {result['cores']} cores of an {result['processor']}):",
        "\n".join(lines),
    ]


def conv1d_table(result: dict[str, Any]) -> list[str]:
    """Dilated 1-D convolutions: what the direct algorithm reaches of the machine, and the peers."""
    isa = result["benchmark"].removeprefix("conv1d_")
    rows = [row for row in result["rows"] if row["table"] == "summary"]
    lines = [
        "| | peak reached by the direct algorithm, AtacWorks layer | median of 15 channels and more "
        "| times faster than PyTorch | least | than OpenVINO | least |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peers = (row["ratios"].get(engine) for engine in ("torch", "openvino"))
        ratios = " | ".join(f"{p['geometric_mean']:.1f} | {p['least']:.2f}" if p else " | " for p in peers)
        shares = (row["atacworks_direct_percent_of_peak"], row["wide_median_direct_percent_of_peak"])
        shown = " | ".join(f"{share:.0f} %" for share in shares)
        lines.append(f"| {row['operation'].replace('_', ' ')} | {shown} | {ratios} |")
    where = f"{result['date']}, {result['cores']} cores of an {result['processor']}"
    narrow = (
        ", in bf16 like the peers (shares of the peak of float32)" if isa in ("avx512_bf16", "amx") else ""
    )
    return [
        f"Dilated 1-D convolutions for `{isa}`{narrow}, "
        f"{rows[0]['points']} points of the grid of Chaudhary et al. (2021); the faster of the direct "
        "and the FFT algorithm "
        f"against the peers ({where}):",
        "\n".join(lines),
    ]


def precision_table(result: dict[str, Any]) -> list[str]:
    """Whole networks with `--precision bf16`."""
    isa = result["benchmark"].removeprefix("precision_")
    rows = [row for row in result["rows"] if row["table"] == "models"]
    engines = list(rows[0]["ms"])
    names = [engine.replace("_", " ") for engine in engines]
    lines = [
        f"| network | {' | '.join(f'{name}, ms' for name in names)} | error of bf16 |",
        "|---" * (len(engines) + 2) + "|",
    ]
    for row in rows:
        times = " | ".join(f"{row['ms'][engine]:.1f}" for engine in engines)
        lines.append(f"| {row['model']} | {times} | {row['relative_error']:.1e} |")
    where = f"{result['date']}, {result['cores']} cores of an {result['processor']}"
    return [
        f"Whole networks on the CPU for `{isa}`, in float32 and with `--precision bf16` ({where}):",
        "\n".join(lines),
    ]


def training_tables() -> list[str]:
    """Training steps: time compared with PyTorch, memory with Caffe's blobs, and resident states."""
    speed, memory, states = (read(f"training_{part}") for part in ("speed", "memory", "states"))
    times = ["| training step | hybridc, ms | PyTorch, ms | times faster |", "|---|---|---|---|"]
    for row in speed["rows"]:
        if row["model"] != "digits":
            figures = f"{row['hybridc_ms']:.0f} | {row['torch_ms']:.0f} | {row['speed']:.2f}"
            times.append(f"| {row['model']}:{row['batch']} | {figures} |")
    bytes_ = [
        "| training step | Caffe-like | all on the GPU | smallest plan | saved against Caffe-like "
        "| slowdown against all on the GPU, at 58.2 % less memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in memory["rows"]:
        sizes = (row[key] / MIB for key in ("baseline_bytes", "all_gpu_bytes", "smallest_bytes"))
        shown = " | ".join(f"{size:,.0f} MiB" for size in sizes)
        share = f"{row['reduction']:.1%} | {row['slowdown']:+.1%}"
        bytes_.append(f"| {row['model']}:{row['batch']} | {shown} | {share} |")
    kept = [
        "| training step | profile | states | kept on the GPU | predicted, ms | all on the host, ms "
        "| times faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in states["rows"]:
        sizes = (row[key] / MIB for key in ("state_bytes", "resident_bytes"))
        shown = " | ".join(f"{size:,.1f} MiB" for size in sizes)
        times_ms = f"{row['time_us'] / 1e3:.2f} | {row['host_us'] / 1e3:.2f} | {row['speedup']:.2f}"
        kept.append(f"| {row['model']}:{row['batch']} | {row['machine']} | {shown} | {times_ms} |")
    where = f"{speed['date']}, {speed['cores']} cores of an {speed['processor']}"
    return [
        "## Training",
        f"Training steps on the CPU for `{speed['rows'][-1]['target']}` compared with PyTorch ({where}):",
        "\n".join(times),
        *_bf16_steps(),
        *rank_tables(),
        "GPU memory of planned training steps, and predicted time on the profile of a K40 "
        f"({memory['date']}; Caffe-like: data and gradient of every blob, ReLU in place):",
        "\n".join(bytes_),
        f"Predicted steps with momentum where the GPU's memory has no limit ({states['date']}): parameters "
        "and moments are kept on the GPU between steps, or all are on the host:",
        "\n".join(kept),
    ]


def _bf16_steps() -> list[str]:
    """Steps of bf16 products against float32 ones and against PyTorch's; losses after the same steps."""
    result = read("training_bf16")
    lines = [
        "| training step | target | processor | fp32, ms | bf16, ms | PyTorch bf16, ms | kernels in bf16 "
        "| loss changed by |",
        "|---" * 8 + "|",
    ]
    for row in result["rows"]:
        where = row.get("processor", result["processor"]), row.get("date", result["date"])
        step = f"| {row['model']} | {row['target']} | {where[0]}, {where[1]} "
        if "ms" in row:
            times = " | ".join(f"{row['ms'][e]:.0f}" for e in ("hybridc", "hybridc_bf16", "torch_bf16"))
            lines.append(f"{step}| {times} | {row['bf16_kernels']} | {row['loss_error']:.1e} |")
        else:
            lines.append(f"{step}| | | | | {row['loss_error']:.1e} |")
    return [f"Training steps with `--precision bf16`, {result['cores']} threads:", "\n".join(lines)]
