"""`hybridc train`, and the training options of `hybridc compile`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hybridc.cli import main
from hybridc.training.checkpoint import FILE, read_checkpoint
from tests.support.process import PATIENCE_SECONDS
from tests.training.conftest import BATCH, examples, network


@pytest.fixture
def data(tmp_path: Path) -> Path:
    images, labels = examples(10 * BATCH)
    np.savez(tmp_path / "train.npz", x=images, y=labels)
    return tmp_path / "train.npz"


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(word) for word in argv]) == 2
    return capsys.readouterr().err


@pytest.mark.isa("avx2")
def test_command_trains_reports_and_exports(
    step_artifact: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trained = tmp_path / "run", tmp_path / "trained.onnx"
    command = [
        "train",
        step_artifact,
        "--data",
        data,
        "--val",
        data,
        "--checkpoint",
        run,
        "--export",
        trained,
    ]
    assert main([str(word) for word in (*command, "--epochs", 2, "--schedule", "cosine")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    for word in ("loss ", "held-out loss ", "accuracy ", " images/s"):
        assert all(word in line for line in lines)
    assert sorted(path.name for path in run.iterdir()) == [FILE, "loss.svg"]
    onnx.checker.check_model(onnx.load(trained), full_check=True)
    arguments = (*command, "--epochs", 3, "--schedule", "cosine", "--resume", "--json")
    assert main([str(word) for word in arguments]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["epochs"] == 3 and len(report["losses"]) == report["steps"] == 30
    assert len(report["evaluations"]) == 3 and not report["stopped"]


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupt_ends_after_the_step_with_a_checkpoint(
    step_artifact: Path, data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "hybridc.cli", "train", str(step_artifact), "--data", str(data)]
    command += ["--epochs", "1000000", "--checkpoint", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("epoch 1/")
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 128 + number and err == ""
    found = read_checkpoint(run)
    assert found is not None
    assert f"stopped after {len(found.progress.losses)} steps; continue with --resume" in out


def test_wrong_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(network(), tmp_path / "small.onnx")
    model, output = tmp_path / "small.onnx", ("-o", tmp_path / "small.hyb")
    assert "HC525" in refusal(capsys, "compile", model, *output, "--loss", "mse")
    assert "HC525" in refusal(capsys, "compile", model, "--train", "--stop-after", "fuse")
    assert "HC570" in refusal(capsys, "compile", model, *output, "--train", "--loss", "huber")
    assert "HC573" in refusal(capsys, "compile", model, *output, "--train", "--batch", 8, "--accumulate", 3)
    assert "HC570" in refusal(capsys, "compile", model, *output, "--train", "--clip-norm", 0)
    assert "HC570" in refusal(capsys, "compile", model, *output, "--train", "--ema", 1)
    assert "--clip-norm requires --train" in refusal(capsys, "compile", model, *output, "--clip-norm", 1)
    assert "HC574" in refusal(capsys, "compile", model, *output, "--train", "--batch", 8)
    text = refusal(capsys, "compile", model, *output, "--train", "--batch", 8, "--loss", "mse(other)")
    assert "no output 'other'" in text and "logits" in text
    text = refusal(capsys, "compile", model, *output, "--train", "--loss", "l1", "--freeze", "Gem_0.weight")
    assert "HC580" in text and "Gemm_0.weight" in text
    assert not (tmp_path / "small.hyb").exists()
    assert main(["train", str(tmp_path), "--data", "x.npz"]) == 3
    assert "HC310" in capsys.readouterr().err


def test_fixed_batch_of_the_model_is_not_overridden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = network()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(proto, tmp_path / "fixed.onnx")
    command = ("compile", tmp_path / "fixed.onnx", "-o", tmp_path / "f.hyb", "--train", "--loss", "l1")
    assert "HC575" in refusal(capsys, *command, "--batch", 8)


def test_a_training_step_is_not_run_but_trained(
    step_artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(step_artifact), "--random"]) == 3
    assert "use `hybridc train`" in capsys.readouterr().err
