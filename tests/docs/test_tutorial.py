"""The tutorial's commands work, in its order, with a smaller network and less effort."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
SMALLER = {"size=128": "size=32", "width=16": "width=4"}
LESS_EFFORT = {command: ["--plan-seconds", "0.05"] for command in ("compile", "compare")}
PREPARED = """
import numpy as np
from hybridc import emulator
emulator.start(1 << 30)
x = np.zeros((1, 3, 32, 32), np.float32)
"""


def commands() -> list[str]:
    """Commands on lines of their own, and those in the text that name a file, in their order."""
    found = re.findall(
        r"^    (hybridc .*)$|`(hybridc [^`]*\bunet\.[^`]*)`", TUTORIAL.read_text(), re.MULTILINE
    )
    return [" ".join((block or inline).split()) for block, inline in found]


def run(folder: Path, *words: str) -> str:
    environment = os.environ | {"HYBRIDC_TRACEBACK": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("own_cache")
def test_commands_of_the_tutorial(tmp_path: Path, command: Callable[[list[str]], str]) -> None:
    printed = {}
    for line in commands():
        words = line.split()[1:]
        if words[0] == "compare":
            pytest.importorskip("onnxruntime")
        words = [SMALLER.get(word, word) for word in words] + LESS_EFFORT.get(words[0], [])
        printed[words[0]] = command(words)
    assert list(printed) == ["models", "compile", "plan", "explain", "run", "compare"]
    assert printed["compare"].count("PASS") == 3
    named = set(re.findall(r"`(ir/\d\d_\w+\.\w+)`", TUTORIAL.read_text()))
    assert len(named) == 12 and [name for name in sorted(named) if not (tmp_path / name).is_file()] == []
    contents = re.search(r"    unet\.hyb/\n((?:      .*\n)+)", TUTORIAL.read_text())
    assert contents is not None
    listed = {line.split()[0] for line in contents[1].splitlines()}
    written = {path.name for path in (tmp_path / "unet.hyb").iterdir()}
    assert listed | {"kernels.cu"} == written | {"kernels.cu"}, "a network as small as here may need no GPU"
    script = TUTORIAL.read_text().partition("In Python the same is:\n")[2]
    run(tmp_path, "-c", PREPARED + "\n".join(line[4:] for line in script.splitlines()))
