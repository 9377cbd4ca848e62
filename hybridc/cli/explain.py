"""Explain in words and numbers why a node runs where it runs, and what the alternatives would cost.

Reads the plan of an artifact, or plans a model; either may be a training step. Needs no GPU, and
generates no code.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridc.cli.support.arguments import add_compile_options, add_gpu_memory, add_json, add_no_weights
from hybridc.cli.support.files import print_json
from hybridc.cli.support.planned import plans_of
from hybridc.cli.support.terminal import output_width, print_text
from hybridc.cli.support.train_options import add_training

HELP = "explain why a node runs where it runs"
EXAMPLE = """\
  hybridc explain resnet.onnx Conv_9 --target cuda+avx2 --gpu-memory 25%
  hybridc explain resnet.hyb Conv_9"""
_FEW = 4
"""Kernels that are explained unless all are asked for: a node that was tiled has many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="OUT.hyb|MODEL.onnx", help="an artifact or a model")
    parser.add_argument("node", metavar="NODE", help="name of an ONNX node, or of a kernel")
    add_compile_options(parser)
    add_no_weights(parser)
    add_gpu_memory(parser)
    parser.add_argument(
        "--all", action="store_true", help="explain every kernel that computes a part of the node"
    )
    add_json(parser)
    add_training(parser, program="step")


def execute(arguments: argparse.Namespace) -> int:
    [found] = plans_of(arguments, programs=("step",))
    from hybridc.report.explain import explain, explanation_to_json, find_kernels

    kernels = find_kernels(found.graph, arguments.node)
    explanations = [
        explain(found.graph, found.plan, found.machine, found.pins, kernel)
        for kernel in (kernels if arguments.all or arguments.json else kernels[:_FEW])
    ]
    if arguments.json:
        print_json({"kernels": [explanation_to_json(e) for e in explanations]})
    else:
        from hybridc.report.explain_text import render_explanation
        from hybridc.report.table import plural

        hidden = len(kernels) - len(explanations)
        more = [f"... and {plural(hidden, 'more kernel')}; --all shows them\n"] if hidden else []
        width = output_width()
        print_text("\n".join([*(render_explanation(each, width) for each in explanations), *more]))
    return 0
