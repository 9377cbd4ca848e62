"""`hybridc plan` and `hybridc explain` of training steps, compiled and not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from hybridc.cli import main
from tests.training.conftest import BATCH, LOSS, OPTIMIZER, network

TRAIN = ["--train", "--loss", LOSS, "--optimizer", OPTIMIZER, "--batch", str(BATCH), "--target", "avx2"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What `step_artifact` was compiled from."""
    onnx.save(network(dropout=0.1), tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


def told(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(word) for word in argv]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(word) for word in argv]) == 2
    return capsys.readouterr().err


@pytest.mark.isa("avx2")
def test_plans_of_a_step_are_those_of_its_model(
    step_artifact: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored: dict[str, Any] = json.loads(told(capsys, "plan", step_artifact, "--json"))["programs"]
    planned: dict[str, Any] = json.loads(told(capsys, "plan", model, *TRAIN, "--json"))["programs"]
    assert list(stored) == list(planned) == ["step", "evaluate"]
    for program, report in planned.items():
        assert stored[program]["kernels"] == report["kernels"]
        assert stored[program]["devices"] == report["devices"]


@pytest.mark.isa("avx2")
def test_every_program_of_a_step_is_shown(
    own_loss_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "plan", own_loss_artifact)
    for program in ("training step", "evaluation", "accumulation"):
        assert f"Plan of the {program} of {own_loss_artifact}\n" in text
    html, trace = tmp_path / "step.html", tmp_path / "step.json"
    text = told(
        capsys, "plan", own_loss_artifact, "--program", "accumulate", "--html", html, "--trace", trace
    )
    assert text.count("Plan of ") == 1 and "the accumulation" in html.read_text() and trace.exists()


@pytest.mark.isa("avx2")
def test_node_of_a_step_is_explained(
    step_artifact: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = told(capsys, "explain", step_artifact, "Gemm_1", "--all")
    assert step == told(capsys, "explain", model, "Gemm_1", "--all", *TRAIN)
    evaluation = told(capsys, "explain", step_artifact, "Gemm_1", "--all", "--program", "evaluate")
    assert step.count("Runs on the CPU") > evaluation.count("Runs on the CPU") == 1


@pytest.mark.isa("avx2")
def test_options_that_do_not_fit_are_refused(
    step_artifact: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "HC525" in refused(capsys, "plan", model, "--loss", LOSS)
    assert "HC525" in refused(capsys, "explain", model, "Gemm_0", "--program", "evaluate")
    text = refused(capsys, "plan", model, *TRAIN, "--program", "accumulate")
    assert "HC525" in text and "its programs are step, evaluate" in text
    assert "HC525" in refused(capsys, "plan", step_artifact, "--program", "accumulate")
    assert "HC516" in refused(capsys, "plan", step_artifact, "--train")
    assert "HC516" in refused(capsys, "plan", step_artifact, "--plan-seconds", 1)
