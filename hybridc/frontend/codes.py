"""Why a model is refused: every code of the frontend, one line each.

HC101  not an ONNX model: the bytes do not parse, or they hold no graph
HC102  the file cannot be read, or it is larger than hybridc reads
HC103  a tensor is malformed: its dimensions and its bytes contradict each other
HC104  external data is refused: outside the model's folder, missing, or beyond the file's end
HC105  an operator of another domain than ONNX's is unknown
HC106  the opset is older or newer than hybridc supports
HC107  a value is defined twice or not at all
HC108  nodes or functions depend on themselves
HC109  the ONNX checker refuses the model
HC110  a type is not supported: sequences, optionals, strings, complex, sparse, or int4 and float8 here
HC111  a dimension of an input is unknown
HC112  a given shape or dimension contradicts the model
HC113  operators that hybridc cannot import
HC114  an operator is used in a way that would be computed wrong
HC115  a node could not be imported
HC116  the model could not be simplified
HC117  a shape depends on data
HC118  the model asks for more values or nodes than hybridc makes from so small a file
HC120  for training: the exporter has folded BatchNorm into convolutions
HC121  for training: the exporter has tied weights that are apart, or copied those that are tied
HC122  for training: the model has no parameters that may be trained
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import onnx_ir as ir

from hybridc.errors import ModelError

T = TypeVar("T")

NOT_ONNX = "HC101"
UNREADABLE = "HC102"
MALFORMED_TENSOR = "HC103"
EXTERNAL_DATA = "HC104"
UNKNOWN_DOMAIN = "HC105"
UNSUPPORTED_OPSET = "HC106"
BAD_DEFINITION = "HC107"
CYCLE = "HC108"
CHECKER = "HC109"
UNSUPPORTED_TYPE = "HC110"
UNKNOWN_DIMENSION = "HC111"
CONTRADICTED_SHAPE = "HC112"
MISSING_OPERATOR = "HC113"
WRONG_RESULT = "HC114"
IMPORT_FAILED = "HC115"
SIMPLIFY_FAILED = "HC116"
DATA_DEPENDENT_SHAPE = "HC117"
TOO_LARGE = "HC118"
FOLDED_NORM = "HC120"
CHANGED_TIES = "HC121"
NO_PARAMETERS = "HC122"


class Refusals:
    """What becomes of refusals: the first is raised, or all are noted and the model is looked at further."""

    def __init__(self, *, all_of_them: bool = False) -> None:
        self.found: list[ModelError] = []
        self._all, self._nodes = all_of_them, set[ir.Node]()

    def add(self, error: ModelError, *nodes: ir.Node) -> None:
        """Refuse the model, because of these nodes of its graph. Raises the error unless it is noted."""
        if not self._all:
            raise error
        self.found.append(error)
        self.give_up(*nodes)

    def give_up(self, *nodes: ir.Node) -> None:
        """Say nothing more of nodes that are refused."""
        self._nodes.update(nodes)

    def stop(self, *because_of: str) -> None:
        """Raises the first refusal that was noted, if any is, with one of these codes or with any: there are
        things that cannot be done with a refused model."""
        for error in self.found:
            if not because_of or error.code in because_of:
                raise error

    def grouped(self, nodes: Mapping[str, Sequence[T]]) -> list[Mapping[str, Sequence[T]]]:
        """Nodes by operator: all of them for one refusal, or each by itself, where refusals are noted."""
        if self._all:
            return [{op: [node]} for op, those in nodes.items() for node in those]
        return [nodes] if nodes else []

    def in_doubt(self, graph: ir.Graph) -> set[ir.Node]:
        """Nodes that are refused, and those that nothing can be said of: they read what such a node makes,
        and its shape is not known."""
        doubtful, unknown = set[ir.Node](), set[ir.Value]()
        for node in graph if self._nodes else ():
            if node in self._nodes or any(value in unknown for value in node.inputs if value is not None):
                doubtful.add(node)
                unknown.update(value for value in node.outputs if not is_static(value))
        return doubtful


def is_static(value: ir.Value) -> bool:
    """Whether type and shape are known."""
    return value.dtype is not None and value.shape is not None and value.shape.is_static()
