"""What the summary of a compilation, and its JSON document, tell of precision."""

from __future__ import annotations

from typing import Any

import pytest

from hybridc.cli.main import main
from hybridc.cli.support.summary import precision_summary
from hybridc.ir.graph import Graph, Kernel, graph_from_json, graph_to_json


def kernel(number: int, **facts: Any) -> Kernel:
    return Kernel(f"k{number}", "f", (), (), origins=(f"Node_{number}",), **facts)


def test_summary_counts_and_names_what_stayed_by_reason() -> None:
    stayed = [kernel(i, precision_note="no bf16 kernel computes this") for i in range(6)]
    graph = Graph((kernel(6, precision="bf16"), *stayed, kernel(7)), (), (), ())
    assert precision_summary(graph) == [
        "  1 kernel in bf16",
        "  6 kernels stayed in fp32, as no bf16 kernel computes this:"
        " Node_0, Node_1, Node_2, Node_3 and 2 more",
    ]


def test_nothing_is_said_of_precision_where_none_was_asked_for() -> None:
    assert precision_summary(Graph((kernel(0),), (), (), ())) == []


def test_graph_tells_precision_only_where_it_is_not_fp32() -> None:
    graph = Graph((kernel(0), kernel(1, precision="int8"), kernel(2, precision_note="why")), (), (), ())
    data = graph_to_json(graph)
    assert ["precision" in k for k in data["kernels"]] == [False, True, True]
    assert graph_from_json(data) == graph


@pytest.mark.parametrize("target", ["avx2", "cuda+avx2", "cuda:sm_80+avx2"])
def test_precision_without_instructions_for_it_is_refused(tmp_path, capsys, target):
    """Of a network that is not trained, those of tensor cores are not enough."""
    model = tmp_path / "m.onnx"
    model.write_bytes(b"not read before the options")
    options = ["--target", target, "--machine", "rtx-3050", "--precision", "bf16"]
    assert main(["compile", str(model), "-o", str(tmp_path / "m.hyb"), *options]) == 2
    assert "error[HC526]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--precision", "fp8"], ["--rounding-error", "much"], ["--bf16-error", "much"]]
)
def test_values_that_make_no_sense_are_refused(tmp_path, capsys, option):
    assert main(["compile", "m.onnx", "-o", str(tmp_path / "m.hyb"), *option]) == 2
    assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "options", "code", "remedy"),
    [
        ("avx512_vnni", ["--precision", "int8"], "HC525", "use --precision bf16"),
        ("cuda+avx512_bf16", ["--precision", "fp16"], "HC525", "use --precision bf16"),
        ("cuda+avx512_bf16", ["--precision", "bf16"], "HC526", "--target cuda:sm_80+avx512_bf16"),
        ("cuda+avx2", ["--precision", "bf16"], "HC526", "--target cuda:sm_80+avx2"),
        ("avx512", ["--precision", "bf16"], "HC526", "--target avx512_bf16 or amx"),
        ("amx", ["--precision", "bf16", "--rounding-error", "0.1"], "HC525", "remove it"),
    ],
)
def test_training_step_is_refused_what_it_cannot_have(tmp_path, capsys, target, options, code, remedy):
    model = tmp_path / "m.onnx"
    model.write_bytes(b"not read before the options")
    arguments = ["--target", target, *options, "--train", "--loss", "mse"]
    assert main(["compile", str(model), "-o", str(tmp_path / "m.hyb"), *arguments]) == 2
    told = capsys.readouterr().err
    assert f"error[{code}]" in told and remedy in told
