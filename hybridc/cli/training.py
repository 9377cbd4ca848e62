"""`hybridc compile --train`: its options, and what it does with them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hybridc.cli.files import print_json
from hybridc.errors import UsageError
from hybridc.options import FP32, CompileOptions, format_bytes, parse_count
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
from hybridc.progress import terminal_progress

if TYPE_CHECKING:
    from hybridc.training.compile import CompiledTraining

_OPTIONS = ("loss", "optimizer", "batch", "accumulate", "freeze")


def add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--train", action="store_true", help="compile a training step, for `hybridc train`, instead of a run"
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
        "--batch", type=parse_count, metavar="N", help="examples a step (default: as in the model)"
    )
    group.add_argument(
        "--accumulate",
        type=parse_count,
        metavar="N",
        help="go through a batch in so many parts, whose gradients are summed up (default: 1)",
    )
    group.add_argument(
        "--freeze",
        action="append",
        metavar="PATTERN",
        help="parameters that stay as they are, with * and ?; BatchNorm goes by running statistics where"
        " these are frozen; may be repeated",
    )


def check_training(arguments: argparse.Namespace) -> None:
    """Raises UsageError HC525 for options of training without `--train`, or the other way round."""
    given = [f"--{option}" for option in _OPTIONS if getattr(arguments, option) is not None]
    if given and not arguments.train:
        raise UsageError("HC525", f"{given[0]} is an option of training", remedy="add --train")
    if arguments.train and (arguments.stop_after is not None or arguments.dump_ir is not None):
        what = "--train compiles several programs, and ends with an artifact"
        raise UsageError("HC525", what, remedy="leave --stop-after and --dump-ir out")
    if arguments.train and arguments.precision != FP32:
        raise UsageError("HC525", "training steps are computed in fp32", remedy="leave --precision out")


def compile_for_training(arguments: argparse.Namespace, options: CompileOptions) -> int:
    """Compile `arguments.model`, and say what was made."""
    from hybridc.training.compile import compile_training

    spec = TrainingSpec(
        loss=arguments.loss or (),
        **({"optimizer": arguments.optimizer} if arguments.optimizer is not None else {}),
        batch=arguments.batch,
        accumulate=arguments.accumulate or 1,
        freeze=tuple(arguments.freeze or ()),
    )
    with terminal_progress() as progress:
        made = compile_training(arguments.model, arguments.output, options, spec, progress)
    if arguments.json:
        print_json(training_to_json(made) | {"target": str(options.target)})
    else:
        print(_summary(made, str(options.target)))
    return 0


def training_to_json(made: CompiledTraining) -> dict[str, Any]:
    """What was compiled: for the step and the evaluation what `hybridc compile --json` says."""
    from hybridc.cli.compile import compiled_to_json

    parts = {"step": made.step, "evaluation": made.evaluation, "accumulation": made.accumulation}
    described = {}
    for name, part in parts.items():
        if part is not None and part.path is not None:
            described[name] = compiled_to_json(part)
    return {"path": str(made.path), "parameters": made.parameters, "seconds": made.seconds, **described}


def _summary(made: CompiledTraining, target: str) -> str:
    from hybridc.cli.compile import plan_summary
    from hybridc.report.table import plural

    size = format_bytes(sum(path.stat().st_size for path in made.path.rglob("*") if path.is_file()))
    trained = plural(made.parameters, "trained parameter")
    lines = [f"{made.path}: {size}, for {target}, {trained}, compiled in {sum(made.seconds.values()):.1f} s"]
    for name, part in (
        ("step", made.step),
        ("accumulation", made.accumulation),
        ("evaluation", made.evaluation),
    ):
        if part is not None:
            lines.append(f"{name}: {plural(len(part.graphs[-1].kernels), 'kernel')}")
            for graph, plan in zip(part.graphs, part.plans, strict=True):
                lines += plan_summary(graph, plan)
    return "\n".join(lines)
