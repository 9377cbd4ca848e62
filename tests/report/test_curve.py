"""The time/memory curve as table, JSON and picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace

from hybridc.ir import Graph
from hybridc.report.curve import Point, curve_to_json, curve_to_svg, points_of, render_curve
from tests.report.test_plan_report import handmade_graph, handmade_plan

MIB = 1024**2
POINTS = (
    Point(MIB, MIB - 512, 9000.0, 8000.0, 512, "waits for copies", "copies to GPU"),
    Point(4 * MIB, 3 * MIB, 5000.0, 5000.0, MIB, "waits for the CPU", "CPU"),
    Point(16 * MIB, 10 * MIB, 1000.0, 0.0, 6 * MIB, "What the run waits for: kernels.", "GPU"),
)


def test_table(golden: Callable[[str, str], None]) -> None:
    golden("sweep.txt", render_curve(POINTS, 8 * MIB, "tiny.onnx on a laptop"))


def test_picture(golden: Callable[[str, str], None]) -> None:
    golden("sweep.svg", curve_to_svg(POINTS, "tiny <onnx> & co"))


def test_picture_is_xml_with_a_dot_for_each_point() -> None:
    for points in (POINTS, POINTS[:1], (Point(0, 0, 0.0, 0.0),)):
        root = ElementTree.fromstring(curve_to_svg(points, "tiny <onnx> & co"))
        assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == len(points)


def test_json_has_the_points_in_their_order() -> None:
    data = curve_to_json(POINTS)
    assert [point["gpu_memory_bytes"] for point in data["points"]] == [MIB, 4 * MIB, 16 * MIB]
    assert data["points"][0] == {
        "gpu_memory_bytes": MIB,
        "peak_bytes": MIB - 512,
        "time_us": 9000.0,
        "bound_us": 8000.0,
        "unused_bytes": 512,
        "binding": "waits for copies",
        "binding_lane": "copies to GPU",
        "bound_line": "",
    }


def test_point_is_read_off_a_plan() -> None:
    (point,) = points_of([handmade_graph()], [handmade_plan()])
    assert point == Point(3 * MIB, MIB + 256, 1431.0, 1400.0, 2 * MIB - 256, point.binding, "CPU")
    assert (
        "kernels on the CPU take 1.33 ms, 1.00 MiB must cross the link to the GPU: 87.0 us" in point.binding
    )


def test_bounds_never_rise_with_memory() -> None:
    graphs = [handmade_graph(), handmade_graph(), handmade_graph()]
    whole, other = graphs[0], graphs[1]

    def bounds(*each: tuple[Graph, float]) -> list[float]:
        plans = [replace(handmade_plan(), time_bound_us=us) for _, us in each]
        return [point.bound_us for point in points_of([graph for graph, _ in each], plans)]

    assert bounds((whole, 8.0), (whole, 9.0), (whole, 7.0)) == [9.0, 9.0, 7.0]
    assert bounds((other, 5.0), (whole, 6.0)) == [5.0, 5.0]
