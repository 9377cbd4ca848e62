"""The options of training: those of `compile`, `plan` and `explain` with `--train`."""

from __future__ import annotations

import argparse

from hybridc.errors import UsageError
from hybridc.options import parse_count
from hybridc.passes.training.spec import (
    TrainingSpec,
    batch_of,
    parse_clip_norm,
    parse_decay,
    parse_loss,
    parse_optimizer,
)

PROGRAMS = ("step", "evaluate", "accumulate", "update")
"""Of a training step, by the names of their folders in its artifact."""
_OPTIONS = ("loss", "optimizer", "batch", "accumulate", "freeze", "clip_norm", "ema", "sync_batchnorm")


def add_training(parser: argparse.ArgumentParser, program: str | None = None) -> None:
    """`program`: what `--program` is by default, for commands that look at one of a step's programs."""
    group = parser.add_argument_group("training")
    group.add_argument(
        "--train",
        action="store_true",
        help="a step for `hybridc train` instead of inference",
    )
    group.add_argument(
        "--loss",
        type=parse_loss,
        metavar="LOSS",
        help="softmax_cross_entropy[:label_smoothing=0.1], mse, l1, bce_with_logits, or for several outputs"
        " 2*mse(OUT1)+l1(OUT2) (default: the model's first output is the loss)",
    )
    group.add_argument(
        "--optimizer",
        type=parse_optimizer,
        metavar="OPTIMIZER",
        help="sgd, adam or adamw and parameters: lr; momentum, nesterov=1 of sgd; beta1, beta2, eps of the"
        " others; weight_decay, as in sgd:lr=0.1,momentum=0.9 (default: sgd:lr=0.01)",
    )
    group.add_argument(
        "--batch",
        type=batch_of,
        metavar="N",
        help="examples per step, or 1..N for steps of at most so many, such as the last one of an epoch"
        " (default: as in the model)",
    )
    group.add_argument(
        "--accumulate",
        type=parse_count,
        metavar="N",
        help="micro-batches of a batch, whose gradients are accumulated (default: 1)",
    )
    group.add_argument(
        "--freeze",
        action="append",
        metavar="PATTERN",
        help="parameters that are not trained; may contain * and ?; BatchNorm uses its running statistics"
        " where these are frozen; may be repeated",
    )
    group.add_argument(
        "--clip-norm",
        type=parse_clip_norm,
        metavar="NORM",
        help="largest norm of the gradient of a batch, of all parameters together (default: any)",
    )
    group.add_argument(
        "--ema",
        type=parse_decay,
        metavar="DECAY",
        help="keep an exponential moving average of each parameter, such as of decay 0.999: held-out examples"
        " are evaluated and models exported with it",
    )
    group.add_argument(
        "--sync-batchnorm",
        action="store_true",
        default=None,
        help="BatchNorm by the statistics of the whole batch, each of whose --accumulate parts is then on a"
        " rank of its own",
    )
    if program is not None:
        group.add_argument(
            "--program",
            choices=PROGRAMS,
            help=f"of a training step, the program to look at (default: {program})",
        )


def check_training(arguments: argparse.Namespace) -> None:
    """Raises UsageError HC525 for options of training without `--train`."""
    given = [f"--{option.replace('_', '-')}" for option in _OPTIONS if getattr(arguments, option) is not None]
    if given and not arguments.train:
        raise UsageError("HC525", f"{given[0]} requires --train", remedy="add --train")


def training_spec(arguments: argparse.Namespace) -> TrainingSpec:
    """What to train, as the options of `add_training` give it."""
    batch, is_partial = arguments.batch or (None, False)
    return TrainingSpec(
        loss=arguments.loss or (),
        batch=batch,
        is_partial=is_partial,
        **({"optimizer": arguments.optimizer} if arguments.optimizer is not None else {}),
        accumulate=arguments.accumulate or 1,
        freeze=tuple(arguments.freeze or ()),
        clip_norm=arguments.clip_norm,
        ema=arguments.ema,
        sync_batchnorm=bool(arguments.sync_batchnorm),
    )
