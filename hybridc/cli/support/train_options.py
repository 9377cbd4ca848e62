"""The options of `hybridc compile --train`."""

from __future__ import annotations

import argparse

from hybridc.errors import UsageError
from hybridc.options import parse_count
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer

_OPTIONS = ("loss", "optimizer", "batch", "accumulate", "freeze")


def add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--train",
        action="store_true",
        help="compile a training step for `hybridc train` instead of inference",
    )
    group.add_argument(
        "--loss",
        type=parse_loss,
        metavar="LOSS",
        help="softmax_cross_entropy[:label_smoothing=0.1], mse, l1, bce_with_logits; several outputs:"
        " 2*mse(OUT1)+l1(OUT2) (default: the model's first output is the loss)",
    )
    group.add_argument(
        "--optimizer",
        type=parse_optimizer,
        metavar="OPTIMIZER",
        help="sgd:lr=0.1,momentum=0.9,nesterov=1,weight_decay=1e-4, or adam or adamw:lr=1e-3,beta1=0.9,"
        "beta2=0.999,eps=1e-8,weight_decay=0.01 (default: sgd:lr=0.01)",
    )
    group.add_argument(
        "--batch", type=parse_count, metavar="N", help="examples per step (default: as in the model)"
    )
    group.add_argument(
        "--accumulate",
        type=parse_count,
        metavar="N",
        help="split a batch into this many micro-batches and accumulate their gradients (default: 1)",
    )
    group.add_argument(
        "--freeze",
        action="append",
        metavar="PATTERN",
        help="parameters that are not trained; PATTERN may contain * and ?; BatchNorm uses its running"
        " statistics"
        " where these are frozen; may be repeated",
    )


def check_training(arguments: argparse.Namespace) -> None:
    """Raises UsageError HC525 for options of training without `--train`."""
    given = [f"--{option}" for option in _OPTIONS if getattr(arguments, option) is not None]
    if given and not arguments.train:
        raise UsageError("HC525", f"{given[0]} requires --train", remedy="add --train")


def training_spec(arguments: argparse.Namespace) -> TrainingSpec:
    """What to train, as the options of `add_training` give it."""
    return TrainingSpec(
        loss=arguments.loss or (),
        **({"optimizer": arguments.optimizer} if arguments.optimizer is not None else {}),
        batch=arguments.batch,
        accumulate=arguments.accumulate or 1,
        freeze=tuple(arguments.freeze or ()),
    )
