"""The time/memory curve as table, JSON and picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

from hybridc.report.curve import Point, curve_to_json, curve_to_svg, render_curve
from tests.report.test_plan_report import handmade_plan

MIB = 1024**2
POINTS = (
    Point(MIB, MIB - 512, 9000.0, 8000.0),
    Point(4 * MIB, 3 * MIB, 5000.0, 5000.0),
    Point(16 * MIB, 10 * MIB, 1000.0, 0.0),
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
    assert set(data["points"][0]) == {"gpu_memory_bytes", "peak_bytes", "time_us", "bound_us"}


def test_point_is_read_off_a_plan() -> None:
    from hybridc.report.curve import point_of

    assert point_of(handmade_plan()) == Point(3 * MIB, MIB + 256, 1431.0, 1400.0)
