"""The first node that is off is found among all values at once, or by cutting the network off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from hybridc.cli.support.bisection import first_miss
from hybridc.cli.support.tolerance import FLOATS
from hybridc.errors import ModelError

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
g (float[2, 3] x) => (float[2, 3] y, float[2, 3] other) {
    a = Exp(x)
    b = Neg(a)
    other = Abs(x)
    c, d = Split <axis = 1, num_outputs = 3>(b)
    e = Concat <axis = 1>(c, d, c)
    f = Tanh(e)
    y = Sin(f)
}""".replace("c, d =", "c, d, spare =")
X = np.arange(6, dtype=np.float32).reshape(2, 3) / 6


class Broken:
    """ONNX's reference implementation, and one that is off from some value on."""

    def __init__(self, first: str, *, most_outputs: int = 100, off_by: float = 0.1) -> None:
        self.first, self.most_outputs, self.off_by = first, most_outputs, off_by
        self.asked: list[list[str]] = []

    def __call__(self, path: Path) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        network = onnx.load(path)
        names = [value.name for value in network.graph.output]
        self.asked.append(names)
        order = [name for node in network.graph.node for name in node.output]
        expected = dict(zip(names, ReferenceEvaluator(network).run(None, {"x": X}), strict=True))
        is_off = len(names) <= self.most_outputs
        found = {
            n: a + self.off_by * (is_off and order.index(n) >= order.index(self.first))
            for n, a in expected.items()
        }
        yield expected, expected
        yield found, expected


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


@pytest.mark.parametrize("first", ["a", "b", "c", "e", "y"])
@pytest.mark.parametrize("most_outputs", [100, 1])
def test_the_first_node_that_is_off_is_found(network: Path, first: str, most_outputs: int) -> None:
    broken = Broken(first, most_outputs=most_outputs)
    found = first_miss(network, "y", broken, lambda expected: FLOATS)
    assert found is not None and found.output == first
    assert found.fused == (most_outputs == 1) and found.max_abs_error == pytest.approx(0.1)
    assert broken.asked[0] == ["a", "b", "c", "d", "spare", "e", "f", "y"], "`other` is not a part of y"
    assert len(broken.asked) <= 5


def test_what_is_told_names_node_operator_shape_and_error(network: Path) -> None:
    found = first_miss(network, "y", Broken("e"), lambda expected: FLOATS)
    text = str(found)
    assert "node 'Concat_4' (Concat), output 'e' (2x3): off by 1.00e-01" in text and "in 6 elements." in text


def test_nothing_is_found_where_nothing_is_off(network: Path) -> None:
    assert first_miss(network, "y", Broken("y", off_by=0), lambda expected: FLOATS) is None


def test_values_that_cannot_be_outputs_are_looked_for_by_cutting_off(network: Path) -> None:
    broken = Broken("b")

    def refusing(path: Path) -> Sequence[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        if len(onnx.load(path).graph.output) > 1:
            raise ModelError("HC117", "depends on data")
        return list(broken(path))

    found = first_miss(network, "y", refusing, lambda expected: FLOATS)
    assert found is not None and found.node == "Neg_1"
