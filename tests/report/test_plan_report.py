"""The plan report on a small graph and plan made by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from hybridc.cli.support.terminal import print_text
from hybridc.ir import (
    Arena,
    Buffer,
    BufferKind,
    Copy,
    Device,
    Graph,
    Guard,
    Kernel,
    Plan,
    Role,
    Run,
    Step,
    Tensor,
)
from hybridc.machine import Link, Machine, Processor
from hybridc.report import render_text, report_plan, report_to_json
from hybridc.report.reasons import faster, footprint_bytes

MIB = 1024**2
GPU, CPU = Device.GPU, Device.CPU


def image(name: str, channels: int, role: Role = Role.ACTIVATION) -> Tensor:
    """`channels` x 64 x 64 floats: 16 KiB a channel."""
    return Tensor(name, (1, channels, 64, 64), "float32", role)


def handmade_graph() -> Graph:
    """A big stem, a convolution, a relu in place of its argument, and a head with a strange ONNX name."""
    return Graph(
        kernels=(
            Kernel("stem", "conv_relu", ("x", "w0"), ("a",), origins=("Conv_0", "Relu_1")),
            Kernel(
                "body",
                "conv",
                ("a", "w1"),
                ("b",),
                gpu_workspace_bytes=MIB,
                origins=("layer1/block0/conv1/Conv",),
            ),
            Kernel("relu", "relu", ("b",), ("c",), may_overwrite=(("c", "b"),), origins=("Relu_3",)),
            Kernel("head", "pool", ("c",), ("y",), origins=("Pool\n4", "Flatten_5", "Gemm_6", "Softmax_7")),
        ),
        tensors=(
            image("x", 3, Role.INPUT),
            Tensor("w0", (256, 3, 3, 3), "float32", Role.WEIGHT),
            image("a", 256),
            Tensor("w1", (64, 256, 1, 1), "float32", Role.WEIGHT),
            image("b", 64),
            image("c", 64),
            Tensor("y", (1, 10), "float32", Role.OUTPUT),
        ),
        inputs=("x",),
        outputs=("y",),
    )


def handmade_plan(budget_bytes: int | None = 3 * MIB) -> Plan:
    """The stem and the body on the CPU, the rest on the GPU."""
    return Plan(
        steps=(
            Run("stem", CPU),
            Run("body", CPU),
            Copy("b", CPU, GPU, waits=(1,)),
            Run("relu", GPU, waits=(2,)),
            Run("head", GPU),
            Copy("y", GPU, CPU, waits=(4,)),
        ),
        buffers=(
            Buffer("x", BufferKind.TENSOR, CPU, 0, 48 * 1024, -1, 0),
            Buffer("a", BufferKind.TENSOR, CPU, 49152, 4 * MIB, 0, 1),
            Buffer("b", BufferKind.TENSOR, CPU, 49152 + 4 * MIB, MIB, 1, 2),
            Buffer("y", BufferKind.TENSOR, CPU, 0, 40, 5, 6),
            Buffer("b", BufferKind.TENSOR, GPU, 0, MIB, 2, 3),
            Buffer("c", BufferKind.TENSOR, GPU, 0, MIB, 3, 4),
            Buffer("y", BufferKind.TENSOR, GPU, MIB, 40, 4, 5),
        ),
        arenas=(Arena(GPU, MIB + 256, MIB + 256), Arena(CPU, 49152 + 5 * MIB, 5 * MIB)),
        budget_bytes=budget_bytes,
        step_us=(1234.5, 99.96, 87.0, 4.126, 3.0, 2.0),
        makespan_us=1431.0,
        time_bound_us=1400.0,
    )


def laptop() -> Machine:
    """Its GPU is 3.2 times as fast as its CPU for kernels that only move bytes, and starts them at once."""
    return Machine(
        "laptop",
        Processor("gpu", 3000, 128, 1.0, 4 << 30),
        Processor("cpu", 400, 40, 3.2, 16 << 30),
        Link(12, 12, 10.0),
    )


def test_text_report_of_a_hybrid_plan(golden: Callable[[str, str], None]) -> None:
    report = report_plan(handmade_graph(), handmade_plan(), 6 * MIB + 300_000, 1_048_832, machine=laptop())
    golden("plan_hybrid.txt", render_text(report, "Plan of tiny.onnx for cuda:sm_90+avx2"))


def test_text_report_of_a_plan_at_its_bound() -> None:
    plan = dataclasses.replace(handmade_plan(), time_bound_us=1431.0)
    assert "which no plan of these kernels in this order can beat" in render_text(
        report_plan(handmade_graph(), plan), "t"
    )


def test_text_report_without_a_gpu(golden: Callable[[str, str], None]) -> None:
    graph = handmade_graph()
    plan = Plan(
        steps=tuple(Run(kernel.name, CPU) for kernel in graph.kernels),
        buffers=(),
        arenas=(Arena(CPU, 5 * MIB, 5 * MIB),),
        budget_bytes=None,
        step_us=(1.0, 2.0, 3.0, 2.5e6),
        makespan_us=2.500006e6,
    )
    golden("plan_cpu.txt", render_text(report_plan(graph, plan), "Plan of tiny.onnx for avx2"))


def test_text_report_is_cut_short_unless_everything_is_asked_for() -> None:
    graph, plan = _long_chain(60)
    report = report_plan(graph, plan)
    short, full = render_text(report, "long"), render_text(report, "long", everything=True)
    assert "... 36 more rows; --all shows them" in short and "k59" not in short
    assert "k59" in full and "more rows" not in full


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_lines_fit_the_terminal_whatever_the_names(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, plan = _long_chain(300, suffix="_" + "x" * 200)
    plan = dataclasses.replace(plan, steps=tuple(_on_cpu(step) for step in plan.steps))
    report = report_plan(graph, plan, 10**15, 10**15)
    monkeypatch.setenv("COLUMNS", str(width))
    print_text(render_text(report, "long", everything=True, width=width))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == width
    heading = next(line for line in lines if "step" in line)
    assert ("footprint" in heading) == (width > 60)


def test_nothing_is_cut_where_there_is_no_terminal() -> None:
    graph, plan = _long_chain(3, suffix="_" + "x" * 200)
    text = render_text(report_plan(graph, plan), "long")
    assert ".." not in text and all(f"k{i}_{'x' * 200}" in text for i in range(3))


def test_text_report_on_a_terminal_of_80_columns(golden: Callable[[str, str], None]) -> None:
    report = report_plan(handmade_graph(), handmade_plan(), machine=laptop())
    golden("plan_hybrid_80.txt", render_text(report, "Plan of tiny.onnx", width=80))


def test_names_cannot_break_lines_or_send_terminal_codes() -> None:
    graph, plan = _long_chain(2, suffix="\n\x1b[31m")
    text = render_text(report_plan(graph, plan), "t\x1bitle")
    assert "\x1b" not in text and "k0??[31m" in text


def test_reasons_name_what_forced_or_allowed_a_device() -> None:
    rows = report_plan(handmade_graph(), handmade_plan(), machine=laptop()).kernels
    assert [row.reason for row in rows] == [
        "footprint above budget",
        "footprint above budget",
        "faster there: 3.2x",
        "faster there: 3.2x",
    ]


def test_kernel_that_is_slower_where_it_runs_stays_for_its_copies_or_for_room() -> None:
    graph, plan = handmade_graph(), handmade_plan(budget_bytes=64 * MIB)
    reasons = [row.reason for row in report_plan(graph, plan, machine=laptop()).kernels]
    assert reasons[:2] == ["transfer costs too much", "transfer costs too much"]
    fast_link = dataclasses.replace(laptop(), link=Link(1e6, 1e6, 0.0))
    reasons = [row.reason for row in report_plan(graph, plan, machine=fast_link).kernels]
    assert reasons[:2] == ["same as its neighbours", "leaves room on the GPU"]


def test_reason_of_a_faster_kernel_says_how_much_faster() -> None:
    assert [faster(there, 10.0) for there in (10.0, 10.4, 16.0, 1234.0)] == [
        "slightly faster",
        "slightly faster",
        "faster there: 1.6x",
        "faster there: 123x",
    ]
    assert faster(1.0, 0.0) == "slightly faster"


def test_reason_of_a_pinned_kernel_is_its_pin() -> None:
    graph, plan = handmade_graph(), handmade_plan()
    rows = report_plan(graph, plan, machine=laptop(), pins={"stem": CPU}).kernels
    assert [row.reason for row in rows][:2] == ["pinned there", "footprint above budget"]


def test_reason_of_a_kernel_with_code_for_one_device() -> None:
    graph = handmade_graph()
    kernels = tuple(dataclasses.replace(kernel, devices=(CPU,)) for kernel in graph.kernels[:2])
    graph = dataclasses.replace(graph, kernels=kernels + graph.kernels[2:])
    assert report_plan(graph, handmade_plan()).kernels[0].reason == "has no GPU code"


def test_second_run_of_a_kernel_is_a_recomputation() -> None:
    plan = handmade_plan()
    plan = dataclasses.replace(plan, steps=(*plan.steps, Run("relu", GPU)), step_us=(*plan.step_us, 4.126))
    report = report_plan(handmade_graph(), plan)
    assert report.kernels[-1].reason == "recomputed to save memory"
    assert report.devices[0].kernels == 3


def test_footprint_counts_an_overwritten_argument_once() -> None:
    graph = handmade_graph()
    assert footprint_bytes(graph, graph.kernel["relu"]) == MIB
    assert footprint_bytes(graph, graph.kernel["body"]) == 4 * MIB + MIB + 65536 + MIB


def test_footprint_keeps_an_argument_that_is_read_later() -> None:
    graph = handmade_graph()
    later = Kernel("later", "later", ("b",), ("z",))
    graph = dataclasses.replace(
        graph,
        kernels=(*graph.kernels, later),
        tensors=(*graph.tensors, Tensor("z", (1,), "float32", Role.OUTPUT)),
    )
    assert footprint_bytes(graph, graph.kernel["relu"]) == 2 * MIB


def test_json_report_has_plain_values_that_survive_a_round_trip() -> None:
    data = report_to_json(report_plan(handmade_graph(), handmade_plan(), 6 * MIB, MIB))
    assert json.loads(json.dumps(data))["kernels"][0]["device"] == "cpu"
    assert data["devices"][0]["peak_bytes"] == MIB + 256
    assert [row["lane"] for row in data["lanes"]] == ["gpu", "cpu", "h2d", "d2h"]
    assert data["kernels"][0]["origins"] == ("Conv_0", "Relu_1")


def _on_cpu(step: Step) -> Step:
    return Run(step.kernel, CPU) if isinstance(step, Run) else step


def _long_chain(length: int, suffix: str = "") -> tuple[Graph, Plan]:
    names = [f"t{i}{suffix}" for i in range(length + 1)]
    kernels = tuple(
        Kernel(f"k{i}{suffix}", "f", (names[i],), (names[i + 1],), origins=(f"n{i}{suffix}", "m"))
        for i in range(length)
    )
    tensors = tuple(Tensor(name, (2**40,), "float32", Role.ACTIVATION) for name in names)
    plan = Plan(
        steps=(Copy(names[0], CPU, GPU), *(Run(kernel.name, GPU) for kernel in kernels)),
        buffers=(),
        arenas=(Arena(GPU, 2**60, 2**60), Arena(CPU, 2**60, 2**60)),
        budget_bytes=2**61,
        step_us=(123456789.0,) * (length + 1),
        makespan_us=1.0,
    )
    return Graph(kernels, tensors, (names[0],), (names[-1],)), plan


def test_conditions_are_told_by_the_nodes_that_decide() -> None:
    graph = handmade_graph()
    flag = Tensor("flag", (), "bool", Role.ACTIVATION)
    deciding = Kernel("less", "less", ("a",), ("flag",), origins=("Less_9",), devices=(CPU,))
    guards = (Guard("flag", True), Guard("fed", False))
    kernels = (*graph.kernels[:-1], replace(graph.kernels[-1], guards=guards), deciding)
    tensors = (*graph.tensors, flag, Tensor("fed", (), "bool", Role.INPUT))
    graph = replace(graph, kernels=kernels, tensors=tensors)
    report = report_plan(graph, handmade_plan())
    assert report.kernels[-1].condition == "if Less_9 and unless fed"
    assert [row.condition for row in report.kernels[:-1]] == [""] * 3
    text = render_text(report, "title")
    assert "; if Less_9 and unless fed" in text and "which of 1 kernel a run executes" in text
