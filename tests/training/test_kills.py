"""A run that is killed at random moments goes on each time from a whole checkpoint, with the same losses."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hybridc
from hybridc.training.checkpoint import FILE, read_checkpoint
from hybridc.training.data import Dataset
from hybridc.training.loop import TrainingRun, train
from tests.training.conftest import BATCH, examples

pytestmark = pytest.mark.isa("avx2")

STEPS, EPOCHS, SEED = 30, 3, 2

_CHILD = f"""
import sys
from pathlib import Path
import hybridc
from hybridc.training.data import Dataset
from hybridc.training.loop import TrainingRun, NullCallback, train
import numpy as np

class Teller(NullCallback):
    def stepped(self, loss, examples):
        print("stepped", flush=True)

arrays = np.load(sys.argv[2])
data = Dataset({{"x": arrays["x"]}}, {{"target": arrays["y"]}})
with hybridc.load_training(sys.argv[1], seed={SEED}) as session:
    run = TrainingRun({EPOCHS}, seed={SEED}, checkpoint=Path(sys.argv[3]), checkpoint_every=1, resume=True)
    train(session, data, run, callback=Teller())
"""


def started(artifact: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD, str(artifact), str(folder / "data.npz"), str(folder / "run")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run_and_kill(artifact: Path, folder: Path, steps: int, delay_seconds: float) -> None:
    """Start or go on, and kill the process some time after so many steps."""
    with started(artifact, folder) as process:
        assert process.stdout is not None
        for _ in range(steps):
            process.stdout.readline()
        time.sleep(delay_seconds)  # somewhere in a step or in the writing of a checkpoint
        process.kill()


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_run_resumes_with_the_same_losses(step_artifact: Path, tmp_path: Path, kills: int) -> None:
    import numpy as np

    images, labels = examples(STEPS * BATCH)
    np.savez(tmp_path / "data.npz", x=images, y=labels)
    with hybridc.load_training(step_artifact, seed=SEED) as session:
        data = Dataset({"x": images}, {"target": labels})
        expected = train(session, data, TrainingRun(EPOCHS, seed=SEED)).losses
    chance, done = random.Random(kills), 0
    for _ in range(kills):
        steps = chance.randint(1, max(2 * STEPS * EPOCHS // kills // 3, 1))
        run_and_kill(step_artifact, tmp_path, steps, chance.uniform(0.0, 0.02))
        found = read_checkpoint(tmp_path / "run")
        if found is not None:
            assert len(found.progress.losses) >= done
            done = len(found.progress.losses)
            assert found.progress.losses == expected[:done]
    assert done > 0
    with started(step_artifact, tmp_path) as process:
        process.communicate()
    assert process.returncode == 0
    last = read_checkpoint(tmp_path / "run")
    assert last is not None and last.progress.losses == expected
    assert [path.name for path in (tmp_path / "run").iterdir()] == [FILE]
