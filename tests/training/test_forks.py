"""Training steps in forked processes, and compilation there: a compiler's threads do not keep a child."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.support.process import PATIENCE_SECONDS
from tests.training.conftest import network

PROGRAM = """
import os, sys
import hybridc
from tests.training.conftest import BATCH, LOSS, OPTIMIZER, examples

def compiled(name):
    options = dict(loss=LOSS, optimizer=OPTIMIZER, batch=BATCH, target="avx2", cache=False)
    hybridc.compile_training("small.onnx", name, **options)
    return hybridc.load_training(name, threads=2)

batch, session = examples(BATCH), compiled("first.hyb")
first = session.step(*batch)
child = os.fork()
if child == 0:
    second = session.step(*batch)
    with compiled("second.hyb") as other:
        sys.exit(7 if other.step(*batch) == first and second < first else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert session.step(*batch) < first
"""


@pytest.mark.slow
def test_forked_process_trains_and_compiles(tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "small.onnx")
    root = Path(__file__).parents[2]
    program = f"import sys; sys.path.insert(0, {str(root)!r})" + PROGRAM
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=PATIENCE_SECONDS, check=True)
