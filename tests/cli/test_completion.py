"""What shells complete: the commands, options and files that there are, as bash itself says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybridc.cli.completion import SHELLS
from hybridc.cli.main import COMMANDS, main
from hybridc.errors import UsageError

shtab = pytest.importorskip("shtab")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected", "others"),
    [
        ("hybridc ", COMMANDS, ()),
        ("hybridc comp", ("compile", "compare", "completion"), ("run",)),
        ("hybridc run --", ("--emulate-gpu", "--trust", "--random"), ("--target",)),
        ("hybridc serve --", ("--http-port", "--batch", "--gpu-memory"), ("--target",)),
        ("hybridc machine ", ("show", "calibrate"), ("run",)),
        ("hybridc completion ", SHELLS, ("run",)),
        ("hybridc compile mod", ("model.onnx",), ("--target",)),
    ],
)
def test_bash_completes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: str,
    expected: tuple[str, ...],
    others: tuple[str, ...],
) -> None:
    (tmp_path / "model.onnx").touch()
    (tmp_path / "completion").write_text(script("bash", capsys))
    program = """
source completion
COMP_LINE=$1 COMP_POINT=${#1} COMP_CWORD=$(($# - 3))
COMP_WORDS=("${@:3}")
$(complete -p hybridc | sed 's/.*-F \\([^ ]*\\).*/\\1/') hybridc "${COMP_WORDS[COMP_CWORD]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""
    words = [*line.split(), *([""] if line.endswith(" ") else [])]
    command = ["bash", "-c", program, "bash", line, "--", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = {word.strip() for word in done.stdout.splitlines()}
    assert set(expected) <= found, done.stderr
    assert not set(others) & found


@pytest.mark.parametrize("shell", SHELLS)
def test_script_is_one_of_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert "emulate-gpu" in text
    if shutil.which(shell) is not None:
        done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_without_shtab_the_error_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == UsageError.exit_code
    assert "hybridc[completion]" in capsys.readouterr().err
