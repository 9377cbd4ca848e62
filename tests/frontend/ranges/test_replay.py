"""What a network is at other sizes as its tape tells it, against folding it there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from hybridc.frontend import codes
from hybridc.frontend.folding import FoldAndExpand
from hybridc.frontend.ranges.replay import Replay, Tape
from hybridc.frontend.simplify import FOLD_INPUT_ELEMENTS, FOLD_OUTPUT_ELEMENTS, _Folding
from hybridc.frontend.values import constant_array, static_shape
from hybridc.sizes import Interval, listed
from tests.support.ranges import padded, with_drawn_weights

LARGEST, SMALLER = (4, 12), (3, 5)

TAKES_SIZES = """g (int64[N, T] ids) => (y) <float[10, 8] table, float[1, 12, 8] places> {
    shape = Shape(ids)
    first = Constant<value = int64[1] {0}>()
    one = Constant<value = int64[1] {1}>()
    two = Constant<value = int64[1] {2}>()
    length = Slice(shape, one, two)
    own = Slice(places, first, length, one)
    words = Gather(table, ids)
    placed = Add(words, own)
    count = Slice(shape, first, one)
    four = Constant<value = int64[2] {2, 4}>()
    split = Concat<axis = 0>(count, length, four)
    heads = Reshape(placed, split)
    turned = Transpose<perm = [0, 2, 1, 3]>(heads)
    y = Softmax<axis = -1>(turned)
}"""

EXPANDS_AT_ONE = """g (float[N, T] x, float[4, T] z) => (y) {
    shape = Shape(z)
    h = Expand(x, shape)
    y = Relu(h)
}"""

HAS_EXPANSION = "g (float[N, T] x) => (y) { h = Celu(x) y = Relu(h) }"


def _model(text: str, sizes: Sequence[int]) -> ir.Model:
    model = ir.serde.deserialize_model(with_drawn_weights(text))
    for node in list(model.graph):
        if node.op_type == "Constant":
            ir.convenience.replace_all_uses_with(node.outputs[0], _initializer(model.graph, node))
            model.graph.remove(node, safe=True)
    known = dict(zip("NT", sizes, strict=True))
    for value in model.graph.inputs:
        assert value.shape is not None
        dims = [dim if isinstance(dim, int) else known[str(dim.value)] for dim in value.shape]
        value.shape = ir.Shape(dims)
    return model


def _initializer(graph: ir.Graph, node: ir.Node) -> ir.Value:
    tensor = node.attributes["value"].as_tensor()
    value = ir.Value(
        name=f"{node.outputs[0].name}/constant",
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


def _folded(model: ir.Model) -> ir.Graph:
    return _Folding(model, "model", False, codes.Refusals(), is_open=True).needed()


def _shapes(text: str, sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    inputs = _model(text, sizes).graph.inputs
    return {value.name or "": static_shape(value) or () for value in inputs}


def _replay(text: str) -> tuple[ir.Graph, Replay | None]:
    model = _model(text, LARGEST)
    tape = Tape.of(model, FOLD_INPUT_ELEMENTS, FOLD_OUTPUT_ELEMENTS)
    graph = _folded(model)
    return graph, None if tape is None else Replay.of(graph, tape, _shapes(text, LARGEST))


def test_it_tells_what_folding_makes() -> None:
    graph, replay = _replay(TAKES_SIZES)
    assert replay is not None
    found = replay.at(_shapes(TAKES_SIZES, SMALLER))
    assert found is not None
    other = _folded(_model(TAKES_SIZES, SMALLER))
    assert [node.op_type for node in graph] == [node.op_type for node in other]
    for node, twin in zip(graph, other, strict=True):
        for value, expected in zip((*node.inputs, *node.outputs), (*twin.inputs, *twin.outputs), strict=True):
            assert value is not None and expected is not None
            told = found.get(value, value)
            assert static_shape(told) == static_shape(expected)
            if expected.const_value is not None:
                np.testing.assert_array_equal(constant_array(told), constant_array(expected))


def test_there_is_none_where_folding_makes_other_nodes() -> None:
    assert _replay(HAS_EXPANSION)[1] is None


def test_there_is_none_at_sizes_at_which_folding_keeps_a_node() -> None:
    _, replay = _replay(EXPANDS_AT_ONE)
    assert replay is not None
    assert replay.at(_shapes(EXPANDS_AT_ONE, (4, 5))) is not None
    assert replay.at(_shapes(EXPANDS_AT_ONE, (1, 12))) is None


def test_there_is_none_at_sizes_that_the_network_does_not_take() -> None:
    _, replay = _replay(EXPANDS_AT_ONE)
    assert replay is not None
    assert replay.at(_shapes(EXPANDS_AT_ONE, (3, 12))) is None


def test_a_network_is_folded_at_its_largest_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[ir.Graph] = []
    call = FoldAndExpand.call

    def counted(self: FoldAndExpand, model: ir.Model) -> object:
        graphs.append(model.graph)
        return call(self, model)

    monkeypatch.setattr(FoldAndExpand, "call", counted)
    bucket = (Interval(2, 4), Interval(3, 12))
    padded(with_drawn_weights(TAKES_SIZES), {"N": listed([4]), "T": listed([12])}, bucket)
    assert len({id(graph) for graph in graphs}) == 1
