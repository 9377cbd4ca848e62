"""The page of a plan: what it holds, and that a browser draws it and shows what the pointer is on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybridc.ir import (
    Arena,
    Buffer,
    BufferKind,
    Copy,
    Device,
    Graph,
    Kernel,
    Plan,
    Role,
    Run,
    Step,
    Tensor,
)
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from hybridc.report import report_plan
from hybridc.report.lanes import spans_of
from hybridc.report.page import render_page
from hybridc.report.trace import MeasuredRun, step_name
from tests.support.browser import Page, browser_page
from tests.support.graphs import chain, machine

GPU, CPU = Device.GPU, Device.CPU
TEXTS = "[...document.querySelectorAll('{}')].map(e => e.textContent)".format
RIGHT_END = (
    "Math.max(...[...document.querySelectorAll('{}')].map(e => e.getBoundingClientRect().right))".format
)
STRANGE = '</script><b>"&'


def planned(length: int = 12) -> tuple[Graph, Plan]:
    """A chain whose plan for half of what it needs uses both devices, and copies."""
    graph = chain(length, size=400, weight=300)
    budget_bytes = all_gpu_peak_bytes(graph, machine()) // 2
    return graph, make_plan(graph, machine(), budget_bytes, (GPU, CPU), effort=Effort(0.05))


def streamed_chain(length: int) -> tuple[Graph, Plan]:
    """Each kernel on the GPU, behind the copy of its weight; everything for two steps in turns."""
    numbers = range(length)
    kernels = tuple(Kernel(f"k{i}", "f", (f"t{i}", f"w{i}"), (f"t{i + 1}",)) for i in numbers)
    tensors = tuple(Tensor(f"t{i}", (512,), "float32", Role.ACTIVATION) for i in range(length + 1))
    weights = tuple(Tensor(f"w{i}", (256,), "float32", Role.WEIGHT) for i in numbers)
    graph = Graph(kernels, (*tensors, *weights), ("t0",), (f"t{length}",))
    steps: list[Step] = []
    buffers = []
    for i in numbers:
        steps += [Copy(f"w{i}", CPU, GPU), Run(f"k{i}", GPU, (2 * i,))]
        buffers.append(Buffer(f"w{i}", BufferKind.WEIGHT, GPU, 1024 * (i % 2), 1024, 2 * i, 2 * i + 1))
        last, offset = min(2 * i + 3, 2 * length - 1), 2048 * (1 + i % 2)
        buffers.append(Buffer(f"t{i + 1}", BufferKind.TENSOR, GPU, offset, 2048, 2 * i + 1, last))
    times_us = tuple(1.0 + i % 7 for i in range(len(steps)))
    arenas = (Arena(GPU, 6144, 6144), Arena(CPU, 2048, 2048))
    makespan_us = timeline(steps, times_us)[0]
    return graph, Plan(tuple(steps), tuple(buffers), arenas, 8192, times_us, makespan_us)


def html_of(graph: Graph, plan: Plan, *, measured: bool = False, is_emulated: bool = False) -> str:
    slower = 1000.0 if is_emulated else 1.5
    spans = tuple((slower * start, slower * end) for start, end in spans_of(plan))
    names = tuple(map(step_name, plan.steps))
    run = MeasuredRun(names, spans, plan.budget_bytes, is_emulated) if measured else None
    return render_page(graph, plan, report_plan(graph, plan, machine=machine()), f"Plan of {STRANGE}", run)


def test_page_needs_nothing_from_elsewhere() -> None:
    text = html_of(*planned())
    assert not re.findall(r"<link[^>]+href=\"(?!data:)|src=|@import|url\((?!#)", text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}


def test_names_cannot_break_out_of_the_page() -> None:
    graph = chain(1)
    graph = replace(graph, kernels=(replace(graph.kernels[0], name=STRANGE),))
    text = html_of(graph, make_plan(graph, machine(), None, (GPU, CPU), effort=Effort(0.01)))
    assert text.count("</script>") == 2 and "<b>" not in text
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert STRANGE in [step["name"] for step in data["steps"]]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("page")
    graph, plan = planned()
    (folder / "plan.html").write_text(html_of(graph, plan, measured=True), encoding="utf-8")
    with browser_page(folder / "profile") as page:
        page.open((folder / "plan.html").as_uri())
        yield page


def test_browser_finds_no_errors_and_loads_nothing_else(page: Page) -> None:
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("data:")] == page.requests[:1]


def test_browser_draws_every_step_planned_and_measured(page: Page) -> None:
    steps = len(planned()[1].steps)
    assert page.evaluate("document.querySelectorAll('#time rect.predicted').length") == steps
    assert page.evaluate("document.querySelectorAll('#time rect.measured').length") == steps
    assert page.evaluate("document.querySelector('#time rect.step').getBoundingClientRect().width > 1")
    assert page.evaluate("document.getElementById('time').textContent.includes('copies to GPU')")


def test_browser_draws_every_buffer(page: Page) -> None:
    buffers = [b for b in planned()[1].buffers if b.device is GPU]
    assert page.evaluate("document.querySelectorAll('#memory rect.buffer').length") == len(buffers)


def test_pointer_on_a_step_shows_what_it_is(page: Page) -> None:
    graph, plan = planned()
    row = next(row for row in report_plan(graph, plan, machine=machine()).kernels if row.device is GPU)
    tip = _hover(page, f"#time rect[data-step='{row.step}']")
    assert row.kernel in tip and row.origins[0] in tip and row.reason in tip and "measured" in tip


def test_pointer_on_a_buffer_shows_what_it_holds(page: Page) -> None:
    name = page.evaluate("data.buffers[0].name")
    tip = _hover(page, "#memory rect[data-buffer='0']")
    assert name in tip and "held from" in tip


def test_pointer_on_nothing_shows_nothing(page: Page) -> None:
    page.move_pointer(1, 1)
    assert page.evaluate("getComputedStyle(document.getElementById('tip')).display") == "none"


def test_wheel_zooms(page: Page) -> None:
    x, y = _middle(page, "#time")
    page.turn_wheel(x, y, -400)
    drawn = "new Promise(done => setTimeout(() => requestAnimationFrame(done), 50))"
    page.evaluate(f"{drawn}.then(() => null)")
    assert page.evaluate("to - from < end / 1.5")
    page.evaluate("look(0, end)")


def test_filter_leaves_the_rows_that_match(page: Page) -> None:
    field = "document.getElementById('filter')"
    page.evaluate(f"{field}.value = 'node3'; {field}.dispatchEvent(new Event('input'))")
    assert page.evaluate("[...document.getElementById('rows').rows].filter(row => !row.hidden).length") == 1


def test_axes_are_named_and_labelled(page: Page) -> None:
    assert page.evaluate("views.map(view => view.axes.map(([name]) => name))") == [["time"], ["predicted"]]
    times = page.evaluate(TEXTS("#time g:last-of-type text"))
    assert len(times) >= 4 and all(re.search(" (us|ms|s)$", label) for label in times)
    held = page.evaluate(TEXTS("#memory text.bytes"))
    assert len(held) >= 3 and held[0] == "0" and all(label.endswith("iB") for label in held[1:])


def test_emulated_times_have_an_axis_of_their_own(tmp_path: Path) -> None:
    graph, plan = planned()
    html = html_of(graph, plan, measured=True, is_emulated=True)
    (tmp_path / "plan.html").write_text(html, encoding="utf-8")
    with browser_page(tmp_path / "profile") as page:
        page.open((tmp_path / "plan.html").as_uri())
        ends = [page.evaluate(RIGHT_END(f"#time rect.{run}")) for run in ("predicted", "measured")]
        assert ends[0] == pytest.approx(ends[1], abs=1) and ends[0] > 1000
        assert page.evaluate("views[0].axes.map(([name]) => name)") == ["predicted", "measured"]
        assert "emulated GPU" in page.evaluate("document.getElementById('time-note').textContent")
        assert page.errors == []


@pytest.mark.parametrize("width", [360, 599, 800])
def test_page_is_readable_on_narrow_screens(page: Page, width: int) -> None:
    page.resize(width, 800)
    try:
        page.evaluate("show()")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(RIGHT_END("svg.chart text")) <= width, "a label reaches out of its chart"
        cells = "[...document.querySelectorAll('#rows td')]"
        assert page.evaluate(f"{cells}.every(e => e.scrollWidth <= e.clientWidth + 1)"), "a word does not fit"
        assert page.evaluate(f"{cells}.every(e => e.offsetHeight < 72)"), "few words take many lines"
    finally:
        page.resize(1400, 1600)


def test_page_of_1500_kernels_is_drawn_and_answers_the_pointer(tmp_path: Path) -> None:
    graph, plan = streamed_chain(1500)
    (tmp_path / "plan.html").write_text(html_of(graph, plan), encoding="utf-8")
    with browser_page(tmp_path / "profile") as page:
        page.open((tmp_path / "plan.html").as_uri())
        assert page.evaluate("document.querySelectorAll('#time rect.predicted').length") == len(plan.steps)
        page.evaluate("look(0, end / 2)")
        assert _hover(page, "#time rect[data-step='1']").startswith("k0")
        assert page.errors == []


def _middle(page: Page, selector: str) -> tuple[float, float]:
    """Where the pointer is on an element's middle."""
    box = page.evaluate(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
        " e.scrollIntoView({block: 'center'});"
        " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    return box[0], box[1]


def _hover(page: Page, selector: str) -> str:
    page.move_pointer(*_middle(page, selector))
    text: str = page.evaluate("document.getElementById('tip').innerText")
    assert page.evaluate("getComputedStyle(document.getElementById('tip')).display") == "block"
    return text
