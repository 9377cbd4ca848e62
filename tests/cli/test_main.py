"""The command line as a whole: help, suggestions, exit codes, and errors without tracebacks."""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridc.cli.main import COMMANDS
from hybridc.errors import (
    ArtifactError,
    DeviceError,
    HybridcError,
    InternalError,
    ModelError,
    PlanError,
    UsageError,
)
from tests.support.process import PATIENCE_SECONDS


def test_help_names_every_command_and_exit_code(cli: Any) -> None:
    outcome = cli("-h")
    assert outcome.code == 0
    assert set(COMMANDS) <= {line.split()[0] for line in outcome.out.splitlines() if line.startswith("    ")}
    assert "4 no plan fits" in outcome.out.replace("\n", " ")


def test_no_command_prints_the_help(cli: Any) -> None:
    assert cli().out == cli("-h").out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_its_example(cli: Any, command: str) -> None:
    outcome = cli(command, "-h")
    example = importlib.import_module(f"hybridc.cli.{command}").EXAMPLE
    assert outcome.code == 0
    assert example in outcome.out and f"hybridc {command} " in example
    assert "%%" not in outcome.out


ACTIONS = ("models list", "models export", "machine show", "machine calibrate")


@pytest.mark.parametrize("words", ["", *COMMANDS, *ACTIONS])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_help_fits_the_terminal(cli: Any, monkeypatch: pytest.MonkeyPatch, words: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = cli(*words.split(), "-h").out.splitlines()
    # Commands to copy are not broken.
    examples = [line for line in lines if re.match(r"  (mpiexec .*)?hybridc ", line)]
    assert max(map(len, examples), default=0) <= 80
    assert max(len(line) for line in lines if line not in examples) <= min(width, 100)
    assert lines[0].startswith(f"usage: hybridc {words}".rstrip()) and (not words or lines[1] == "")


def test_help_of_compile_begins_with_what_everybody_needs(cli: Any) -> None:
    text = cli("compile", "-h").out
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [
        "positional arguments",
        "options",
        "open dimensions and inputs of the model",
        "planning",
        "CPU kernels",
        "cache and progress",
        "measured tiles of CPU kernels",
        "training",
        "debugging",
        "Example",
    ]
    first = text.partition("options:")[2].partition("\n\n")[0]
    options = re.findall(r"^  (?:-\w[^-]*)?(--[a-z-]+)", first, re.MULTILINE)
    assert options == ["--help", "--output", "--target", "--gpu-memory", "--json"]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_parse(command: str) -> None:
    from hybridc.cli.main import build_parser

    for line in importlib.import_module(f"hybridc.cli.{command}").EXAMPLE.splitlines():
        words = line.split()  # "hybridc ..." or "mpiexec -n 4 hybridc ..."
        arguments = build_parser()[0].parse_args(words[words.index("hybridc") + 1 :])
        assert arguments.command == command


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "hybridc", "--version"]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.startswith(
        "hybridc "
    )


def test_version(cli: Any) -> None:
    outcome = cli("--version")
    assert (outcome.code, outcome.out.split()[0]) == (0, "hybridc")


def test_help_imports_neither_tvm_nor_numpy() -> None:
    code = "import sys, hybridc.cli as c; c.main(['-h']); print({'tvm', 'numpy', 'onnx'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("argv", "suggestion"),
    [
        (["compil"], "did you mean 'compile'?"),
        (["qqq"], "commands are compile, run"),
        (["plan", "m.onnx", "--gpu-memry", "1MiB"], "did you mean '--gpu-memory'?"),
        (["plan", "m.onnx", "more"], "hybridc plan -h"),
        (["compile", "m.onnx", "-o"], "write for example --output OUT.hyb"),
        (["--verison"], "did you mean '--version'?"),
        (["models", "lst"], "hybridc models -h"),
        (["compile", "m.onnx", "m.hyb"], "did you mean -o m.hyb?"),
        (["m.onnx"], "did you mean hybridc compile m.onnx?"),
        (["help"], "hybridc --help"),
        (["run", "m.hyb", "--emulate-gpu"], "write for example --emulate-gpu 64MiB"),
        (["compile", "m.onnx", "--gpu_memory", "4G"], "did you mean '--gpu-memory'?"),
        (["plan", "m.onnx", "--gpu-mem", "1MiB"], "did you mean '--gpu-memory'?"),
    ],
)
def test_wrong_use_is_explained(cli: Any, argv: list[str], suggestion: str) -> None:
    outcome = cli(*argv)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error[HC500]: ") and suggestion in outcome.err


def test_missing_file_suggests_its_neighbour(cli: Any, model: Path) -> None:
    outcome = cli("plan", model.with_name("netwrok.onnx"))
    assert outcome.code == 2
    assert outcome.err.startswith("error[HC530]") and f"did you mean {model}?" in outcome.err


def test_missing_folder_is_named(cli: Any, tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'no'}" in cli("plan", tmp_path / "no" / "m.onnx").err


def test_folder_is_no_model(cli: Any, model: Path, artifact: Path) -> None:
    assert "is a folder" in cli("compile", model.parent, "-o", model.parent / "o").err
    assert f"did you mean {model}?" in cli("sweep", model.parent).err
    assert "give the ONNX model it was compiled from" in cli("compare", artifact).err


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("net.pt", "torch.onnx.export"), ("net.TFLITE", "tf2onnx"), ("net.onnx", "export it again")],
)
@pytest.mark.parametrize("command", ["compile", "plan", "sweep", "compare"])
def test_file_that_is_no_onnx_model_tells_how_to_make_one(
    cli: Any, tmp_path: Path, command: str, name: str, remedy: str
) -> None:
    (tmp_path / name).touch()
    outcome = cli(command, tmp_path / name)
    assert outcome.code == 2 and "error[HC530]" in outcome.err and remedy in outcome.err


def test_model_in_place_of_an_artifact_tells_its_compilation(cli: Any, model: Path) -> None:
    assert f"hybridc compile {model} -o network.hyb" in cli("run", model, "--random").err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InternalError("HC901", "x"), 1),
        (UsageError("HC501", "x"), 2),
        (ModelError("HC101", "x"), 3),
        (ArtifactError("HC301", "x"), 3),
        (PlanError("HC201", "x"), 4),
        (DeviceError("HC401", "x"), 5),
    ],
)
def test_errors_end_with_the_exit_code_of_their_group(
    cli: Any, fakes: Any, model: Path, error: HybridcError, code: int
) -> None:
    fakes.error = error
    outcome = cli("plan", model)
    assert (outcome.code, outcome.err) == (code, f"{error}\n")


def test_unexpected_error_has_no_traceback_but_tells_how_to_get_it(
    cli: Any, fakes: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYBRIDC_TRACEBACK", raising=False)
    fakes.error = RuntimeError("first line\nsecond line")
    outcome = cli("plan", model)
    assert outcome.code == 1
    assert outcome.err.startswith("error[HC900]: internal error: RuntimeError: first line\n")
    assert "HYBRIDC_TRACEBACK=1" in outcome.err and "Traceback" not in outcome.err
    monkeypatch.setenv("HYBRIDC_TRACEBACK", "1")
    assert "Traceback" in cli("plan", model).err


def test_interrupt_is_quiet(cli: Any, fakes: Any, model: Path) -> None:
    fakes.error = KeyboardInterrupt()
    outcome = cli("plan", model)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


def test_interrupt_that_was_turned_into_another_error_is_quiet_too(
    cli: Any, fakes: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_interrupt(*_: Any, **__: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError from None

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("hybridc.cli.support.interrupts.GRACE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr("hybridc.compiler.plan_model", lose_the_interrupt)
    outcome = cli("plan", model)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")
    assert signal.getsignal(signal.SIGINT) is before


def test_full_disk_is_the_users_error(cli: Any, fakes: Any, model: Path) -> None:
    fakes.error = OSError(errno.ENOSPC, "No space left on device", "weights.bin")
    outcome = cli("plan", model)
    assert outcome.code == 2
    assert (
        outcome.err == "error[HC531]: No space left on device\n  --> weights.bin\n  = help: free some space\n"
    )


def test_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, "-m", "hybridc.cli", "models", "list"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (141, "")


def test_closed_standard_output_is_no_error() -> None:
    command = f"{sys.executable} -m hybridc.cli models list >&-"
    run = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
