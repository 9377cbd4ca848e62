"""How often a network with open dimensions is folded, and what is made of it where once is not enough."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from hybridc.errors import ModelError
from hybridc.frontend.folding import FoldAndExpand
from hybridc.frontend.ranges.follow import match_at
from hybridc.frontend.ranges.opening import Opening, open_dimensions
from hybridc.sizes import Bucket, Interval, parse_sizes
from tests.support.expansion import parsed
from tests.support.ranges import padded

DIMS = {"N": parse_sizes("1..4")}
BUCKET = (Interval(2, 4),)
BY_ONES = """g (float[N, 3] x) => (y) {
    zero = Constant<value = int64[1] {0}>() minus = Constant<value = int64[1] {-1}>()
    s = Shape(x) rank = Shape(s) ones = ConstantOfShape<value = int64[1] {1}>(rank)
    kept = Mul(ones, minus) is_kept = Equal(s, kept) to = Where(is_kept, ones, s)
    mean = ReduceMean<axes = [1]>(x) y = Expand(mean, to)
}"""
"""Expands to a shape as torch writes it."""


def test_shapes_by_a_few_filled_numbers_need_no_further_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def count_of(text: str) -> int:
        calls: list[ir.Model] = []
        call = FoldAndExpand.call

        def counted(self: FoldAndExpand, model: ir.Model) -> object:
            calls.append(model)
            return call(self, model)

        with monkeypatch.context() as patched:
            patched.setattr(FoldAndExpand, "call", counted)
            padded(parsed(text), DIMS, BUCKET)
        return len(calls)

    assert count_of(BY_ONES) == count_of("g (float[N, 3] x) => (y) { y = Relu(x) }")


def _graph(text: str) -> ir.Graph:
    return ir.serde.deserialize_model(parsed(f"g (float[N, 3] x) => (y) {{ {text} }}")).graph


def test_what_one_round_leaves_other_nodes_of_is_folded_to_the_end() -> None:
    graph, brief, whole = _graph("y = Relu(x)"), _graph("h = Identity(x) y = Relu(h)"), _graph("y = Relu(x)")
    dimensions = open_dimensions(parsed("g (float[N, 3] x) => (y) { y = Relu(x) }"), {}, DIMS)
    opening = Opening(dimensions, BUCKET, lambda sizes: {})
    asked: list[bool] = []

    def folded(sizes: Bucket, is_brief: bool) -> ir.Graph:
        asked.append(is_brief)
        return brief if is_brief else whole

    found = match_at(graph, opening, (Interval(3, 3),), folded, "model")
    assert asked == [True, False]
    assert found == {graph.inputs[0]: whole.inputs[0], graph.outputs[0]: whole.outputs[0]}
    with pytest.raises(ModelError, match="N is 3"):
        match_at(graph, opening, (Interval(3, 3),), lambda sizes, is_brief: brief, "model")
