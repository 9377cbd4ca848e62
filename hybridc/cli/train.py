"""Train with a compiled training step, on examples from a file.

Ctrl-C stops after the current step, with a checkpoint if --checkpoint names a folder; --resume continues
from it as if there had been no interruption. The GPU is the computer's own, or an emulated one.

Under mpiexec, --ranks mpi trains on all ranks together: they share the parts into which --accumulate divided
the batch when the step was compiled.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hybridc
from hybridc.cli.support.arguments import add_emulated_gpu, add_host_memory, add_json, add_threads
from hybridc.cli.support.files import existing_artifact, print_json, write_text
from hybridc.cli.support.interrupts import deferred_interrupts
from hybridc.errors import UsageError
from hybridc.options import (
    DEFAULT_NET_TIMEOUT_SECONDS,
    parse_bytes,
    parse_count,
    parse_seed,
)
from hybridc.training.schedule import parse_schedule

if TYPE_CHECKING:
    from mpi4py.MPI import Comm
    from tqdm import tqdm

    from hybridc.training.checkpoint import Evaluated, TrainingProgress
    from hybridc.training.data import Dataset
    from hybridc.training.session import TrainingSession

HELP = "train with a compiled training step"
EXAMPLE = """\
  hybridc train step.hyb --data train.npz --val val.npz --checkpoint run
  hybridc train step.hyb --data cifar-10 --epochs 10 --export trained.onnx
  mpiexec -n 4 hybridc train step.hyb --data train.npz --ranks mpi"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, metavar="STEP.hyb", help="the compiled training step")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE.npz|DIR",
        help="examples: arrays named like the model's inputs and targets (or x and y if there is one of"
        " each), or a folder with CIFAR-10's binary files",
    )
    parser.add_argument(
        "--val", type=Path, metavar="FILE.npz|FILE.bin", help="held-out examples, evaluated after each epoch"
    )
    parser.add_argument(
        "--epochs", type=parse_count, default=1, metavar="N", help="number of epochs (default: %(default)s)"
    )
    parser.add_argument(
        "--lr", type=_positive, metavar="RATE", help="learning rate that replaces the optimizer's"
    )
    parser.add_argument(
        "--schedule",
        type=parse_schedule,
        default=parse_schedule("constant"),
        metavar="SCHEDULE",
        help="learning rate schedule: constant, step:every=30,factor=0.1 or cosine:end=0, each with warmup=N;"
        " every and warmup count epochs (default: constant)",
    )
    parser.add_argument(
        "--seed",
        type=parse_seed,
        default=0,
        metavar="N",
        help="seed of the order of examples and of dropout (default: %(default)s)",
    )
    _add_results(parser)
    add_emulated_gpu(parser)
    _add_ranks(parser)
    add_threads(parser)
    parser.add_argument(
        "--gpu-memory",
        type=parse_bytes,
        metavar="1GiB",
        help="use the plans with the largest budget up to this",
    )
    add_host_memory(parser)
    add_json(parser)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", choices=["mpi"], help="train on all ranks of mpiexec together (needs hybridc[mpi])"
    )
    parser.add_argument(
        "--net-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="with --ranks: end all ranks when one does not answer for so long"
        f" (default: {DEFAULT_NET_TIMEOUT_SECONDS:.0f})",
    )
    parser.add_argument(
        "--wire",
        choices=["fp32", "bf16"],
        help="with --ranks: how gradients are sent; bf16 halves the bytes and adds what rounding loses to the"
        " next step (default: fp32)",
    )
    parser.add_argument(
        "--shard-states",
        action="store_true",
        default=None,
        help="with --ranks: each rank has, and updates, the optimizer's states of some parameters alone",
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="folder for checkpoint and loss curve")
    parser.add_argument(
        "--checkpoint-every",
        type=parse_count,
        metavar="STEPS",
        help="steps between checkpoints (default: one checkpoint per epoch)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint if there is one")
    parser.add_argument(
        "--curve",
        type=Path,
        metavar="FILE.svg",
        help="plot of the losses (default: in the --checkpoint folder)",
    )
    parser.add_argument(
        "--export", type=Path, metavar="OUT.onnx", help="write the trained model, for inference"
    )
    parser.add_argument(
        "--training-graph",
        action="store_true",
        help="with --export: leave the graph as it was compiled, with its loss, and BatchNorm and Dropout as"
        " they train",
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError("HC513", f"invalid learning rate {text!r}", remedy="give a positive number: 0.1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError("HC513", f"invalid time {text!r}", remedy="give a positive number of seconds: 60")
    return value


def execute(arguments: argparse.Namespace) -> int:
    if arguments.ranks is None:
        for option in ("net_timeout", "wire", "shard_states"):
            if getattr(arguments, option) is not None:
                name = option.replace("_", "-")
                raise UsageError("HC500", f"--{name} requires --ranks", remedy="add --ranks mpi")
        _check(arguments)
        with _loaded(arguments) as session:
            return _train(session, arguments)
    from hybridc.cli.support.mpi import started_ranks

    with started_ranks(arguments.net_timeout or DEFAULT_NET_TIMEOUT_SECONDS) as ranks:
        ranks.together(lambda: _check(arguments))
        with _loaded(arguments, ranks.comm) as session:
            return _train(session, arguments)


def _check(arguments: argparse.Namespace) -> None:
    existing_artifact(arguments.artifact)
    if arguments.resume and arguments.checkpoint is None:
        raise UsageError("HC500", "there is nothing to resume", remedy="give --checkpoint DIR with --resume")
    if arguments.training_graph and arguments.export is None:
        raise UsageError("HC500", "--training-graph requires --export", remedy="add --export OUT.onnx")


def _loaded(arguments: argparse.Namespace, comm: Comm | None = None) -> TrainingSession:
    return hybridc.load_training(
        arguments.artifact,
        threads=arguments.threads,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        emulate_gpu=arguments.emulate_gpu,
        seed=arguments.seed,
        comm=comm,
        net_timeout=arguments.net_timeout or DEFAULT_NET_TIMEOUT_SECONDS,
        wire=arguments.wire or "fp32",
        shard_states=bool(arguments.shard_states),
    )


def _train(session: TrainingSession, arguments: argparse.Namespace) -> int:
    from hybridc.training.data import load_dataset
    from hybridc.training.loop import TrainingRun, train

    def loaded() -> tuple[Dataset, Dataset | None]:
        files = (arguments.data, arguments.val)
        data, validation = (
            None if file is None else load_dataset(file, session.inputs, session.targets) for file in files
        )
        assert data is not None
        return data, validation

    ranks = session.ranks
    data, validation = loaded() if ranks is None else ranks.together(loaded)
    is_first = ranks is None or ranks.rank == 0
    left = 0 if session.spec.is_partial else data.size % session.batch
    if is_first and left and data.size > left and not arguments.json:
        print(
            f"{left} of {data.size:,} examples, others in each epoch, are left out: compile with"
            f" --batch 1..{session.batch} for a last step of fewer"
        )
    with (
        deferred_interrupts() as interrupts,
        _teller(arguments.epochs, is_quiet=arguments.json or not is_first) as teller,
    ):
        run = TrainingRun(
            arguments.epochs,
            arguments.schedule,
            arguments.lr,
            arguments.seed,
            arguments.checkpoint,
            arguments.checkpoint_every,
            arguments.resume,
            stop=lambda: bool(interrupts),
        )
        progress = train(session, data, run, validation, teller)
        if is_first:
            _write_results(session, arguments, progress)
    is_stopped = progress.epoch < arguments.epochs
    if is_first and arguments.json:
        print_json(_report(progress, teller) | {"stopped": is_stopped})
    elif is_first and is_stopped:
        print(_farewell(arguments, progress))
    return (
        128 + (interrupts or [signal.SIGTERM])[0] if is_stopped else 0
    )  # another rank may have had the signal


def _write_results(
    session: TrainingSession, arguments: argparse.Namespace, progress: TrainingProgress
) -> None:
    from hybridc.training.curve import losses_to_svg

    curve = arguments.curve
    if curve is None and arguments.checkpoint is not None:
        curve = arguments.checkpoint / "loss.svg"
    if curve is not None and progress.losses:
        write_text(curve, losses_to_svg(progress, f"Loss of {arguments.artifact.name}"))
    if arguments.export is not None:
        session.export_onnx(arguments.export, for_training=arguments.training_graph)


def _report(progress: TrainingProgress, teller: Teller) -> dict[str, Any]:
    return {
        "epochs": progress.epoch,
        "steps": len(progress.losses),
        "losses": list(progress.losses),
        "evaluations": [asdict(evaluated) for evaluated in progress.evaluations],
        "examples_per_second": teller.examples_per_second,
    }


def _farewell(arguments: argparse.Namespace, progress: TrainingProgress) -> str:
    where = f"stopped after {len(progress.losses)} steps"
    if arguments.checkpoint is None:
        return f"{where}; nothing was saved, as there is no --checkpoint"
    return f"{where}; continue with --resume --checkpoint {arguments.checkpoint}"


class Teller:
    """A bar over the steps of an epoch where standard error is a terminal, and a line for every epoch."""

    def __init__(self, epochs: int, *, is_quiet: bool) -> None:
        self._epochs, self._is_quiet = epochs, is_quiet
        self._bar: tqdm | None = None
        self._examples, self._seconds, self._last = 0, 0.0, 0.0

    @property
    def examples_per_second(self) -> float:
        return self._examples / self._seconds if self._seconds else 0.0

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None:
        self._last = time.perf_counter()
        if sys.stderr.isatty() and not self._is_quiet:
            from tqdm import tqdm

            form = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
            self._bar = tqdm(
                desc=f"epoch {epoch + 1}/{self._epochs}",
                total=steps,
                initial=done,
                file=sys.stderr,
                leave=False,
                bar_format=form,
                dynamic_ncols=True,
            )

    def stepped(self, loss: float, examples: int) -> None:
        now = time.perf_counter()
        self._examples, self._seconds, self._last = (
            self._examples + examples,
            self._seconds + now - self._last,
            now,
        )
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {loss:.4g}, {self.examples_per_second:.0f} images/s", refresh=False
            )
            self._bar.update()

    def epoch_ended(self, epoch: int, mean_loss: float, evaluated: Evaluated | None) -> None:
        self.close()
        if self._is_quiet:
            return
        parts = [f"loss {mean_loss:.4g}"]
        if evaluated is not None:
            parts.append(f"held-out loss {evaluated.loss:.4g}")
            if evaluated.accuracy is not None:
                parts.append(f"accuracy {evaluated.accuracy:.2%}")
        speed = f"{self.examples_per_second:.0f} images/s"
        print(f"epoch {epoch + 1}/{self._epochs}: {', '.join(parts)}, {speed}", flush=True)

    def close(self) -> None:
        """Wipe the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@contextmanager
def _teller(epochs: int, *, is_quiet: bool) -> Iterator[Teller]:
    teller = Teller(epochs, is_quiet=is_quiet)
    try:
        yield teller
    finally:
        teller.close()
