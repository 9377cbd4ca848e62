"""Files and reports about plans: --trace, --html and --measured, `explain`, `sweep`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridc.options import Budget

MIB = 1024**2


def test_run_writes_the_predicted_and_the_measured_run(
    cli: Any, fakes: Any, artifact: Path, tmp_path: Path
) -> None:
    assert cli("run", artifact, "--random", "--trace", tmp_path / "t.json").code == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [(e["pid"], e["name"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans[:4] == [(1, "k0", 1.0), (1, "a", 2.0), (1, "k1", 3.0), (1, "y", 4.0)]
    assert spans[4:] == [(2, "k0", 2.0), (2, "a", 3.0), (2, "k1", 4.0), (2, "y", 11.0)]


def test_run_tells_what_kernels_do_to_memory(cli: Any, fakes: Any, artifact: Path, tmp_path: Path) -> None:
    words = ["run", artifact, "--random", "--emulate-gpu", "2M", "--trace", tmp_path / "t.json"]
    outcome = cli(*words)
    heading, row = outcome.out.split("\n\n")[1].splitlines()
    assert heading.split()[:3] == ["function", "kernels", "launches"]
    assert row.split()[1:] == ["1", "1", "8,192", "8.00x", "1,024", "1.00x", "-"]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    told = {event["pid"]: event["args"] for event in events if event["name"] == "k0"}
    assert "read_sectors" not in told[1] and told[2]["read_sectors"] == 8192
    assert (told[2]["read_ratio"], told[2]["bank_conflict_factor"]) == (8.0, None)
    [accesses] = cli(*words, "--json").json()["accesses"]
    assert accesses["counted_blocks"] == 16 and accesses["written_ratio"] == 1.0


def test_plan_writes_a_page_with_what_was_measured(
    cli: Any, fakes: Any, artifact: Path, tmp_path: Path
) -> None:
    trace, page = tmp_path / "t.json", tmp_path / "new" / "p.html"
    assert cli("run", artifact, "--random", "--trace", trace).code == 0
    assert cli("plan", artifact, "--html", page, "--measured", trace).code == 0
    assert '"measured":[[0.0,2.0],' in page.read_text()


def test_measured_run_of_one_of_several_plans_is_shown_with_that_plan(
    cli: Any, fakes: Any, artifact: Path, tmp_path: Path
) -> None:
    trace, page = tmp_path / "t.json", tmp_path / "p.html"
    assert cli("run", artifact, "--random", "--emulate-gpu", "2M", "--trace", trace).code == 0
    fakes.artifact_budgets = (MIB // 2, MIB, 4 * MIB)
    outcome = cli("plan", artifact, "--html", page, "--measured", trace)
    assert outcome.code == 0 and "2 of 3" in outcome.out
    assert f'"budget_bytes":{MIB},' in page.read_text() and '"is_emulated":true' in page.read_text()


@pytest.mark.parametrize("others", [(MIB // 2, 4 * MIB), (4 * MIB, 8 * MIB)])
def test_measured_run_of_a_plan_that_the_artifact_lacks_is_refused(
    cli: Any, fakes: Any, artifact: Path, tmp_path: Path, others: tuple[int, ...]
) -> None:
    trace, page = tmp_path / "t.json", tmp_path / "p.html"
    assert cli("run", artifact, "--random", "--trace", trace).code == 0
    fakes.artifact_budgets = others
    outcome = cli("plan", artifact, "--html", page, "--measured", trace)
    assert outcome.code == 2 and "error[HC536]" in outcome.err and not page.exists()


def test_plan_of_a_model_writes_a_page_and_a_trace(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    words = ["--target", "cuda+avx2", "--html", tmp_path / "p.html", "--trace", tmp_path / "t.json"]
    outcome = cli("plan", model, *words, "--json")
    assert outcome.code == 0 and outcome.json()["kernels"]
    assert '"measured":null' in (tmp_path / "p.html").read_text()
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1}


def test_measured_needs_a_page(cli: Any, fakes: Any, artifact: Path) -> None:
    outcome = cli("plan", artifact, "--measured", "t.json")
    assert outcome.code == 2 and "--measured requires --html" in outcome.err


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        "{}",
        '{"traceEvents": []}',
        '{"traceEvents": [{"ph": "X", "pid": 2, "name": "", "ts": 0, "dur": 1, "args": {"step": 0}}],'
        ' "otherData": 1}',
    ],
)
def test_what_is_no_measured_run_is_refused(
    cli: Any, fakes: Any, artifact: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "t.json").write_text(text)
    outcome = cli("plan", artifact, "--html", tmp_path / "p.html", "--measured", tmp_path / "t.json")
    assert outcome.code == 2 and "error[HC536]" in outcome.err
    assert not (tmp_path / "p.html").exists()


def test_page_that_cannot_be_written_is_refused(cli: Any, fakes: Any, artifact: Path) -> None:
    outcome = cli("plan", artifact, "--html", artifact)
    assert outcome.code == 2 and "error[HC531]" in outcome.err


def test_explain_of_an_artifact(cli: Any, fakes: Any, artifact: Path) -> None:
    out = cli("explain", artifact, "Relu_1").out
    assert out.startswith("k1 (Relu_1)\n") and "Runs on the GPU" in out and "run it on the CPU" in out
    (kernel,) = cli("explain", artifact, "k1", "--json").json()["kernels"]
    assert (kernel["kernel"], kernel["device"]) == ("k1", "gpu")


def test_explain_of_a_model_plans_it(cli: Any, fakes: Any, model: Path) -> None:
    outcome = cli("explain", model, "Relu_0", "--target", "cuda+avx2", "--gpu-memory", "50%")
    assert outcome.code == 0 and outcome.out.startswith("k0 (Relu_0)\n")
    assert fakes.options[0].gpu_memory == (Budget(percent=50.0),)


def test_explain_of_a_node_in_many_kernels_shows_some(
    cli: Any, fakes: Any, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridc.cli.explain._FEW", 1)
    monkeypatch.setattr("hybridc.report.explain.find_kernels", lambda graph, node: graph.kernels)
    out = cli("explain", artifact, "Relu").out
    assert "k0 (Relu_0)" in out and "k1 (" not in out and "... and 1 more kernel; --all" in out
    assert "k1 (Relu_1)" in cli("explain", artifact, "Relu", "--all").out


def test_explain_refuses_a_node_that_there_is_not(cli: Any, fakes: Any, artifact: Path) -> None:
    outcome = cli("explain", artifact, "Relu_2")
    assert outcome.code == 2 and "error[HC538]" in outcome.err and "did you mean" in outcome.err


def test_sweep_plans_once_for_budgets_in_even_steps(cli: Any, fakes: Any, model: Path) -> None:
    words = ["--target", "cuda+avx2", "--gpu-memory", "25%..100%", "--points", "4"]
    outcome = cli("sweep", model, *words, "--json")
    (options,) = fakes.options
    assert options.gpu_memory == tuple(Budget(percent=float(p)) for p in (25, 50, 75, 100))
    points = outcome.json()["points"]
    assert [point["gpu_memory_bytes"] for point in points] == [2 * MIB, 4 * MIB, 6 * MIB, 8 * MIB]
    assert {"unused_bytes", "binding", "binding_lane"} < set(points[0])
    assert "4.00 MiB    50%" in cli("sweep", model, *words).out


def test_sweep_in_bytes(cli: Any, fakes: Any, model: Path) -> None:
    words = ["--target", "cuda+avx2", "--gpu-memory", "1MiB..3MiB", "--points", "3"]
    assert cli("sweep", model, *words).code == 0
    assert [budget.size_bytes for budget in fakes.options[0].gpu_memory] == [MIB, 2 * MIB, 3 * MIB]


def test_sweep_of_a_list_of_budgets(cli: Any, fakes: Any, model: Path) -> None:
    assert cli("sweep", model, "--target", "cuda+avx2", "--gpu-memory", "25%,3MiB").code == 0
    assert fakes.options[0].gpu_memory == (Budget(percent=25.0), Budget(size_bytes=3 * MIB))


def test_sweep_of_one_point_takes_the_largest_budget(cli: Any, fakes: Any, model: Path) -> None:
    assert cli("sweep", model, "--target", "cuda+avx2", "--points", "1").code == 0
    assert fakes.options[0].gpu_memory == (Budget(percent=100.0),)


def test_sweep_writes_a_picture_or_numbers(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    words = ["sweep", model, "--target", "cuda+avx2", "--points", "2", "-o"]
    assert cli(*words, tmp_path / "c.svg").code == 0
    assert (tmp_path / "c.svg").read_text().startswith("<svg")
    assert cli(*words, tmp_path / "c.json").code == 0
    assert len(json.loads((tmp_path / "c.json").read_text())["points"]) == 2


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--gpu-memory", "50%"], "HC510"),
        (["--gpu-memory", "50%..1GiB"], "HC510"),
        (["--gpu-memory", "2GiB..1GiB"], "HC510"),
        (["--gpu-memory", "1..2"], "HC510"),
        (["--gpu-memory", "25%,"], "HC510"),
        (["--gpu-memory", "25%,50%", "--points", "3"], "HC500"),
        (["--points", "0"], "HC513"),
        (["-o", "curve.png"], "HC537"),
        (["--target", "avx2"], "HC515"),
    ],
)
def test_sweep_refuses_what_it_cannot_do(
    cli: Any, fakes: Any, model: Path, words: list[str], code: str
) -> None:
    outcome = cli("sweep", model, "--target", "cuda+avx2", *words)
    assert outcome.code == 2 and f"error[{code}]" in outcome.err
    assert fakes.options == []


@pytest.fixture
def decoder(cli: Any, tmp_path: Path) -> Path:
    """One layer of two heads of 32 numbers, without weights."""
    path = tmp_path / "decoder.onnx"
    sizes = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 2, "feed_forward": 96, "vocabulary": 100}
    words = [f"--param={name}={size}" for name, size in sizes.items()]
    words += ["--param=dynamic_context=True", "--no-weights"]
    assert cli("models", "export", "llama", path, *words).code == 0
    return path


@pytest.mark.isa("avx2")
def test_sweep_of_contexts_counts_weights_and_caches(cli: Any, decoder: Path, tmp_path: Path) -> None:
    words = ["--target", "cuda+avx2", "--gpu-memory", "8KiB,1MiB", "--context", "128,64", "--no-weights"]
    words += ["--plan-seconds", "0.02", "-o", str(tmp_path / "contexts.json")]
    outcome = cli("sweep", decoder, *words)
    assert outcome.code == 0 and "tokens/s" in outcome.out and "predicted" in outcome.out
    rows = json.loads((tmp_path / "contexts.json").read_text())["contexts"]
    assert [row["context"] for row in rows] == [64, 64, 128, 128]
    for row in rows:
        caches = row["decoder"]["cache_bytes"]
        assert sum(caches.values()) == 2 * 4 * 2 * row["context"] * 32  # float32
        assert row["gpu_weight_bytes"] <= row["gpu_memory_bytes"]
        assert row["decoder"]["tokens_per_s"] == pytest.approx(1e6 / row["predicted_us"])
        assert [other["name"] for other in row["decoder"]["others"]] == [
            "layer split",
            "streaming",
            "CPU alone",
        ]
    table, products = 100 * 64, (3 * 64 + 64 + 3 * 96 + 100) * 64  # of four bits, with a scale for each 32
    in_all = {row["gpu_weight_bytes"] + row["host_weight_bytes"] for row in rows[:2]}
    assert len(in_all) == 1 and min(in_all) >= 4 * table + products // 2 + products // 32 * 4


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--context", "64"], "HC500"),
        (["--context", "64", "--gpu-memory", "10%..50%"], "HC500"),
        (["--context", "64", "--gpu-memory", "50%", "--points", "2"], "HC500"),
        (["--context", "64", "--gpu-memory", "50%,"], "HC510"),
        (["--context", "64", "--gpu-memory", "50%", "-o", "curve.svg"], "HC537"),
        (["--context", "0", "--gpu-memory", "50%"], "HC513"),
    ],
)
def test_sweep_of_contexts_refuses_what_it_cannot_do(
    cli: Any, fakes: Any, model: Path, words: list[str], code: str
) -> None:
    outcome = cli("sweep", model, "--target", "cuda+avx2", *words)
    assert outcome.code == 2 and f"error[{code}]" in outcome.err
