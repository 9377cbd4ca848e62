"""--pin, --plan-seconds and --plan-timeout: read, passed on, refused, and obeyed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridc.ir import Device

GPU, CPU = Device.GPU, Device.CPU


@pytest.mark.parametrize("command", ["plan", "compile"])
def test_pins_and_effort_are_passed_on(
    cli: Any, fakes: Any, model: Path, tmp_path: Path, command: str
) -> None:
    words = ["--target", "cuda+avx2", "--pin", "Conv_3=cpu", "--pin", "a=b/*=GPU", "--plan-seconds", "2.5"]
    output = ["-o", tmp_path / "o.hyb"] if command == "compile" else []
    assert cli(command, model, *output, *words).code == 0
    (options,) = fakes.options
    assert options.pins == (("Conv_3", CPU), ("a=b/*", GPU))
    assert options.plan_seconds == 2.5


def test_without_them_there_are_no_pins_and_the_usual_effort(cli: Any, fakes: Any, model: Path) -> None:
    assert cli("plan", model, "--target", "cuda+avx2").code == 0
    assert (fakes.options[0].pins, fakes.options[0].plan_seconds) == ((), 10.0)


@pytest.mark.parametrize("pin", ["Conv_3", "Conv_3=tpu", "=cpu", ""])
def test_pin_that_is_none_is_refused(cli: Any, fakes: Any, model: Path, pin: str) -> None:
    outcome = cli("plan", model, "--target", "cuda+avx2", "--pin", pin)
    assert outcome.code == 2 and "error[HC519]" in outcome.err and "NODE=cpu" in outcome.err
    assert fakes.options == []


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "inf", "nan"])
def test_impossible_effort_is_refused(cli: Any, fakes: Any, model: Path, seconds: str) -> None:
    outcome = cli("plan", model, f"--plan-seconds={seconds}")
    assert outcome.code == 2 and "error[HC518]" in outcome.err
    assert fakes.options == []


def test_pin_needs_a_target_with_a_gpu(cli: Any, fakes: Any, model: Path) -> None:
    outcome = cli("plan", model, "--target", "avx2", "--pin", "Conv_3=cpu")
    assert outcome.code == 2 and "error[HC515]" in outcome.err and "cuda+avx2" in outcome.err


@pytest.fixture
def mlp(cli: Any, tmp_path: Path) -> Path:
    path = tmp_path / "mlp.onnx"
    assert cli("models", "export", "mlp", path, "--param", "hidden=32", "--param", "inputs=20").code == 0
    return path


@pytest.mark.isa("avx2")
def test_pinned_nodes_run_where_they_are_pinned(cli: Any, mlp: Path) -> None:
    words = ["--target", "cuda+avx2", "--plan-seconds", "0.1", "--json"]
    for device in ("cpu", "gpu"):
        planned = cli("plan", mlp, *words, "--pin", f"*={device}").json()
        assert {row["device"] for row in planned["kernels"]} == {device}
    first, *_, last = cli("plan", mlp, *words).json()["kernels"]
    pins = ["--pin", f"{first['origins'][0]}=cpu", "--pin", f"{last['origins'][-1]}=gpu"]
    rows = {row["kernel"]: row["device"] for row in cli("plan", mlp, *words, *pins).json()["kernels"]}
    assert (rows[first["kernel"]], rows[last["kernel"]]) == ("cpu", "gpu")


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("pins", "code"),
    [(["nothing_like_it=cpu"], "HC205"), (["*=cpu", "Gemm*=gpu"], "HC206"), (["*=gpu"], "HC203")],
)
def test_pins_that_cannot_be_met_are_refused_by_name(cli: Any, mlp: Path, pins: list[str], code: str) -> None:
    words = [word for pin in pins for word in ("--pin", pin)]
    outcome = cli(
        "plan", mlp, "--target", "cuda+avx2", "--plan-seconds", "0.1", "--gpu-memory", "1KiB", *words
    )
    assert outcome.code != 0 and f"error[{code}]" in outcome.err
    if code != "HC203":
        assert all(pin in outcome.err for pin in pins)


@pytest.mark.isa("avx2")
def test_plan_that_time_runs_out_for_is_valid_and_says_so(cli: Any, mlp: Path) -> None:
    words = ["--target", "cuda+avx2", "--gpu-memory", "50%", "--plan-seconds", "0.1", "--no-cache"]
    soon = cli("plan", mlp, *words, "--plan-timeout", "1e-6", "--json").json()
    assert soon["planning"]["is_stopped"] and soon["planning"]["standings"]
    assert 0 < soon["time_bound_us"] <= soon["makespan_us"]
    assert soon["devices"][0]["peak_bytes"] <= soon["budget_bytes"]
    whole = cli("plan", mlp, *words)
    assert "planned in" in whole.out and "stopped" not in whole.out
