"""Of an artifact nothing is executed but by a run: planning and explaining it read data alone."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridc import emulator
from hybridc.cli.main import main
from hybridc.errors import ArtifactError
from hybridc.json_values import sealed
from hybridc.runtime import load
from tests.support.artifacts import hybrid_model

CONSTRUCTOR = """
#include <fstream>
__attribute__((constructor)) static void leave_a_trace() { std::ofstream("@PATH@") << "here"; }
"""


def replace_file(artifact: Path, name: str, data: bytes) -> None:
    """Put other bytes into an artifact, with the right hash."""
    (artifact / name).write_bytes(data)
    manifest = json.loads((artifact / "manifest.json").read_text())
    (file,) = (f for f in manifest["files"] if f["name"] == name)
    file.update(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (artifact / "manifest.json").write_text(json.dumps(sealed(manifest)))


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    emulator.start(1 << 20)
    return hybrid_model().write(tmp_path / "model.hyb")


def test_planning_and_explaining_load_no_library(artifact: Path, capsys: pytest.CaptureFixture) -> None:
    trace, library = artifact.parent / "trace", artifact.parent / "other.so"
    source = CONSTRUCTOR.replace("@PATH@", str(trace)).encode()
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source, check=True)
    for data in (b"\x7fELF and so on", library.read_bytes()):
        replace_file(artifact, "library.so", data)
        assert main(["plan", str(artifact)]) == 0
        assert main(["explain", str(artifact), "k1"]) == 0
    assert capsys.readouterr().out
    assert not trace.exists()
    loading = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    subprocess.run([sys.executable, "-c", loading, str(artifact / "library.so")], check=True)
    assert trace.exists(), "the constructor does what it is there for"


def test_library_that_lacks_a_function_is_refused(artifact: Path) -> None:
    library = artifact.parent / "other.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=b"", check=True)
    replace_file(artifact, "library.so", library.read_bytes())
    with pytest.raises(ArtifactError) as caught:
        load(artifact)
    assert caught.value.code == "HC307"


def larger_parameter(manifest: dict[str, Any]) -> None:
    manifest["functions"][0]["parameters"][0]["shape"] = [1 << 40]


def other_layout(manifest: dict[str, Any]) -> None:
    (function,) = (f for f in manifest["functions"] if f["name"] == "matmul")
    function["parameters"][1]["layout"] = 1


@pytest.mark.parametrize(
    "change", [larger_parameter, other_layout, lambda manifest: manifest["functions"].pop()]
)
def test_plan_that_does_not_fit_its_functions_is_refused(artifact: Path, change: Any) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text())
    change(manifest)
    (artifact / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(ArtifactError, match="does not fit its functions") as caught:
        load(artifact)
    assert caught.value.code == "HC306"


def test_function_that_takes_other_arrays_than_the_manifest_says_is_refused_when_it_is_called(
    artifact: Path,
) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text())
    (function,) = (f for f in manifest["functions"] if f["name"] == "relu")
    for parameter in function["parameters"]:
        parameter["shape"] = [2, 8]
    (artifact / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with load(artifact) as session:
        feeds = {port.name: np.zeros(port.shape, np.float32) for port in session.get_inputs()}
        for _ in range(2):
            with pytest.raises(ArtifactError, match="relu_cpu") as caught:
                session.run(None, feeds)
            assert caught.value.code == "HC306"
