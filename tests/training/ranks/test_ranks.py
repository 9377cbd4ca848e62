"""`hybridc train --ranks mpi`: losses against one rank, and what becomes of ranks that fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import hybridc
from hybridc.artifact.load import open_artifact, promised_bytes
from hybridc.cli import main
from hybridc.ir import Device
from hybridc.training.artifact import ACCUMULATE, EVALUATE, UPDATE
from hybridc.training.checkpoint import FILE, read_checkpoint
from tests.support.process import becomes_true
from tests.training.conftest import BATCH, LOSS, OPTIMIZER, examples, network
from tests.training.ranks.conftest import PARTS, finish, start

CLI = ("-c", "import sys; from hybridc.cli import main; sys.exit(main())", "train")
pytestmark = pytest.mark.isa("avx2")


def command(artifact: Path, data: Path, *more: object) -> tuple[object, ...]:
    return (*CLI, artifact, "--data", data, "--ranks", "mpi", "--threads", "1", *more)


def losses(count: int, artifact: Path, data: Path, *more: object) -> list[float]:
    code, out, told = finish(start(count, *command(artifact, data, "--json", *more)))
    assert code == 0, told
    return json.loads(out)["losses"]  # rank 0 alone prints


@pytest.fixture(scope="module")
def of_one_rank(parts_artifact: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses of five epochs, without MPI."""
    folder = tmp_path_factory.mktemp("one")
    words = ["train", parts_artifact, "--data", data, "--epochs", 5, "--checkpoint", folder]
    assert main([str(word) for word in words]) == 0
    found = read_checkpoint(folder)
    assert found is not None and len(found.progress.losses) == 50
    return found.progress.losses


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_have_the_losses_of_one(count: int, parts_artifact: Path, data: Path, of_one_rank: Any) -> None:
    found = losses(count, parts_artifact, data, "--epochs", 5)
    np.testing.assert_allclose(found, of_one_rank, rtol=1e-6)


@pytest.mark.slow
def test_ranks_have_the_same_losses_each_time(parts_artifact: Path, data: Path) -> None:
    found = losses(2, parts_artifact, data, "--epochs", 5)
    assert losses(2, parts_artifact, data, "--epochs", 5) == found


@pytest.mark.slow
def test_ranks_share_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    """BatchNorm's statistics are those of parts, which are alike on any number of ranks."""
    artifact, data = tmp_path / "step.hyb", tmp_path / "train.npz"
    options: Any = {"loss": LOSS, "optimizer": OPTIMIZER, "batch": f"1..{BATCH}", "accumulate": PARTS}
    hybridc.compile_training(network(), artifact, target="avx2", **options)
    images, labels = examples(3 * BATCH + PARTS + 1)
    np.savez(data, x=images, y=labels)
    one = losses(1, artifact, data, "--epochs", 3)
    assert len(one) == 12
    np.testing.assert_allclose(losses(2, artifact, data, "--epochs", 3), one, rtol=1e-6)
    np.savez(data, x=images[:-2], y=labels[:-2])  # fewer than parts: left out by several ranks
    assert len(losses(2, artifact, data)) == 3 and len(losses(1, artifact, data)) == 4


def test_bf16_on_the_wire_is_near(parts_artifact: Path, data: Path, of_one_rank: Any) -> None:
    found = losses(2, parts_artifact, data, "--epochs", 5, "--wire", "bf16")
    np.testing.assert_allclose(found, of_one_rank, rtol=0.05)
    assert found[-10:] != list(of_one_rank[-10:])


@pytest.mark.slow
def test_ranks_clip_the_gradient_of_the_whole_batch(
    clipping_artifact: Path, data: Path, tmp_path: Path, of_one_rank: Any
) -> None:
    words = ["train", clipping_artifact, "--data", data, "--checkpoint", tmp_path]
    assert main([str(word) for word in words]) == 0
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint is not None
    of_one = checkpoint.progress.losses
    assert of_one != of_one_rank[: len(of_one)]
    np.testing.assert_allclose(losses(2, clipping_artifact, data), of_one, rtol=1e-6)


@pytest.mark.slow
def test_ranks_on_gpus_keep_to_the_budget(
    gpu_artifact: Path, data: Path, tmp_path: Path, of_one_rank: Any
) -> None:
    """Each on an emulated GPU of as many bytes as the plans promise to keep to, and of no more."""
    kinds = (ACCUMULATE, UPDATE, EVALUATE)
    plans = {kind: open_artifact(gpu_artifact / kind).plan for kind in kinds}
    limit = max(promised_bytes(plan) for plan in plans.values())
    assert 0 < plans[ACCUMULATE].arena_bytes(Device.GPU) <= limit
    more = ("--emulate-gpu", f"{limit}B", "--val", data, "--shard-states", "--checkpoint", tmp_path)
    found = losses(2, gpu_artifact, data, "--epochs", 1, *more)
    np.testing.assert_allclose(found, of_one_rank[: len(found)], rtol=1e-5)


@pytest.mark.slow
def test_averages_of_weights_are_those_of_one_rank(data: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "step.hyb"
    options: Any = {"loss": LOSS, "optimizer": OPTIMIZER, "batch": BATCH, "accumulate": 2, "ema": 0.8}
    hybridc.compile_training(network(), artifact, target="avx2", **options)
    words = ["train", artifact, "--data", data, "--checkpoint", tmp_path / "one"]
    assert main([str(word) for word in words]) == 0
    losses(2, artifact, data, "--checkpoint", tmp_path / "two")
    one, two = (read_checkpoint(tmp_path / name) for name in ("one", "two"))
    assert one is not None and two is not None and one.optimizer.keys() == two.optimizer.keys()
    averages = [name for name in one.optimizer if name.endswith("#average")]
    for name in averages:
        np.testing.assert_allclose(two.optimizer[name], one.optimizer[name], rtol=1e-4, atol=1e-6)
    assert any(not np.array_equal(one.optimizer[n], one.model[n.removesuffix("#average")]) for n in averages)


def rank_process(rank: int, folder: Path) -> int | None:
    """The process of a rank whose command has this folder: the child, once it has left its parent behind."""
    parents: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else []
            is_of_job = str(folder).encode() in words
            if is_of_job and f"PMI_RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return next(
        (number for number, parent in parents.items() if parent in parents), next(iter(parents), None)
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_killed_rank_of_several_is_named(rank: int, parts_artifact: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = ("--checkpoint", folder, "--checkpoint-every", 1, "--epochs", 10**6)
    job = start(PARTS, *command(parts_artifact, data, *more))
    assert becomes_true((folder / FILE).exists)
    process = rank_process(rank, folder)
    assert process is not None
    os.kill(process, signal.SIGKILL)
    ended, _, told = finish(job)
    assert ended != 0 and f"error[HC434]: rank {rank} was killed by SIGKILL" in told, told
    for other in range(PARTS):
        assert becomes_true(lambda r=other: rank_process(r, folder) is None)  # type: ignore[misc]


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGSTOP, signal.SIGTERM))],
)
def test_a_rank_that_fails_ends_all_and_the_run_goes_on_with_another_number(
    number: int, parts_artifact: Path, data: Path, tmp_path: Path, of_one_rank: Any
) -> None:
    folder = tmp_path / "run"
    more = ("--checkpoint", folder, "--checkpoint-every", 1)
    endless = command(parts_artifact, data, *more, "--net-timeout", 3, "--epochs", 10**6)
    job = start(2, *endless)
    assert becomes_true((folder / FILE).exists)
    process = rank_process(1, folder)
    if process is None:
        job.kill()
        pytest.skip("ranks are found by what MPICH tells them")
    os.kill(process, number)
    ended, _, told = finish(job)
    assert becomes_true(lambda: rank_process(0, folder) is None and rank_process(1, folder) is None)
    if number == signal.SIGTERM:
        assert ended == 128 + number, told
    elif number == signal.SIGKILL:
        assert ended != 0 and "error[HC434]: rank 1 was killed by SIGKILL" in told, told
    else:
        assert ended != 0 and "error[HC434]: rank 1 did not answer rank 0 within 3 s" in told, told
    found = read_checkpoint(folder)
    assert found is not None and found.progress.losses
    if len(found.progress.losses) < len(of_one_rank):
        again = losses(4, parts_artifact, data, *more, "--resume", "--epochs", 5)
        np.testing.assert_allclose(again, of_one_rank, rtol=1e-6)


def steps_of(folder: Path) -> tuple[float, ...]:
    """Losses of the steps that the checkpoint has, which must be whole at any moment."""
    found = read_checkpoint(folder)
    return () if found is None else found.progress.losses


def kill_a_rank(
    job: subprocess.Popen[str], rank: int, folder: Path, steps: int, delay_seconds: float
) -> None:
    """Some time after the checkpoint has so many steps."""
    assert becomes_true(lambda: rank_process(rank, folder) is not None or job.poll() is not None)
    assert becomes_true(lambda: len(steps_of(folder)) >= steps or job.poll() is not None)
    time.sleep(delay_seconds)
    process = rank_process(rank, folder)
    assert process is not None, finish(job)
    os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("kills", [pytest.param(20, marks=pytest.mark.slow)])
def test_ranks_killed_at_random_moments_lose_no_checkpoint(
    kills: int, parts_artifact: Path, data: Path, tmp_path: Path
) -> None:
    """Of each job one rank, at its start or some steps later: in a step, or while a checkpoint is written."""
    folder, chance = tmp_path / "run", Random(kills)
    done: tuple[float, ...] = ()
    rate = ("--lr", 0.001)  # so small that what numbers of ranks round differently does not grow
    kept = (*rate, "--checkpoint", folder, "--checkpoint-every", 1, "--resume")
    for _ in range(kills):
        count, more = chance.choice([2, 4]), chance.choice([0, 1, 1, 5])
        rank, delay_seconds = chance.randrange(count), chance.uniform(0.0, 0.02 if more else 2.0)
        job = start(count, *command(parts_artifact, data, *kept, "--epochs", 10**6))
        kill_a_rank(job, rank, folder, len(done) + more, delay_seconds)
        ended, _, told = finish(job)
        assert ended != 0, told
        for other in range(count):
            assert becomes_true(lambda r=other: rank_process(r, folder) is None)  # type: ignore[misc]
        found = steps_of(folder)
        assert len(found) >= len(done) + more and found[: len(done)] == done
        done = found
    epochs = len(done) // 10 + 1
    again = losses(1, parts_artifact, data, *kept, "--epochs", epochs)
    assert len(again) == 10 * epochs and tuple(again[: len(done)]) == done
    whole = losses(1, parts_artifact, data, *rate, "--epochs", epochs)
    np.testing.assert_allclose(again, whole, rtol=1e-6)


def refusal(count: int, *words: object) -> str:
    code, _, told = finish(start(count, *words))
    assert code in (2, 3), told
    assert told.count("error[") == 1, told
    return told


@pytest.mark.slow  # with BatchNorm of all ranks the same is refused
def test_number_of_ranks_that_cannot_share_a_batch_is_refused(parts_artifact: Path, data: Path) -> None:
    assert "error[HC587]: 3 ranks cannot share a batch of 4 parts" in refusal(
        3, *command(parts_artifact, data)
    )


def test_rank_with_other_data_or_without_is_named(parts_artifact: Path, data: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom mpi4py import MPI\nfrom hybridc.cli import main\n"
        "files = sys.argv.pop().split(',')\n"
        "sys.exit(main([*sys.argv[1:], '--data', files[MPI.COMM_WORLD.rank]]))\n"
    )
    with np.load(data) as arrays:
        np.savez(tmp_path / "other.npz", x=arrays["x"] + 1, y=arrays["y"])
    words = (program, "train", parts_artifact, "--ranks", "mpi", "--threads", "1")
    told = refusal(2, *words, f"{data},{tmp_path / 'other.npz'}")
    assert "error[HC589]: rank 1 has another data than rank 0" in told
    told = refusal(2, *words, f"{data},{tmp_path / 'none.npz'}")
    assert "error[HC571]: rank 1: cannot read the examples" in told


def test_options_of_ranks_need_ranks(
    parts_artifact: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(parts_artifact), "--data", str(data), "--net-timeout", "3"]
    assert main(words) == 2
    assert "--net-timeout requires --ranks" in capsys.readouterr().err
