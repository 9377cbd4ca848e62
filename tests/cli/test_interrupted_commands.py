"""Commands that are ended at a random moment say so by their exit code, and leave nothing half written."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.support.process import PATIENCE_SECONDS

COMMANDS = {
    "compile model.onnx -o new.hyb --target cuda+avx2 --gpu-memory 50% --plan-seconds 0.2 --no-cache": 12.0,
    "compile model.onnx -o step.hyb --train --loss softmax_cross_entropy --optimizer sgd:lr=0.1": 9.0,
    "run model.hyb --random --output outputs": 1.5,
    "compare model.onnx --target avx2": 6.0,
    "sweep model.onnx --target cuda+avx2 --gpu-memory 10%..100% -o curve.svg": 6.0,
}
"""And about how many seconds each takes."""
HYBRIDC = (sys.executable, "-m", "hybridc.cli")
BEGUN = "from hybridc.cli import main; print('begun', flush=True); raise SystemExit(main())"
TOLD = (sys.executable, "-c", BEGUN)
"""The same, once it can be interrupted: Python alone takes long to begin where much else runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("interrupted")
    for words in (
        "models export lenet model.onnx",
        "compile model.onnx -o model.hyb --target avx2",
    ):
        subprocess.run([*HYBRIDC, *shlex.split(words)], cwd=path, check=True, capture_output=True)
    return path


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words.split()[0])
def test_interrupted_command_leaves_nothing_half_written(folder: Path, words: str, seed: int) -> None:
    pytest.importorskip("onnxruntime")
    random = Random(seed)
    number = random.choice([signal.SIGINT, signal.SIGTERM])
    before = {path.name for path in folder.iterdir()}
    with subprocess.Popen(
        [*TOLD, *shlex.split(words)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        try:
            process.wait(0.2 + random.uniform(0, COMMANDS[words]))
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    made = {path.name for path in folder.iterdir()} - before
    # Python has no handlers any more when it ends; a shell tells the same code then
    assert process.returncode in (0, 128 + number, -number), errors
    assert "Traceback" not in errors and not any(name.startswith(".") for name in made)
    if process.returncode != 0:
        assert made <= {"outputs"} and not list(folder.glob("outputs/*.npy")), made
    for name in made & {"new.hyb", "step.hyb"}:
        subprocess.run([*HYBRIDC, "plan", name], cwd=folder, check=True, capture_output=True)
