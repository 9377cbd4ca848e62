"""A network before and after its operators are expanded, both run by onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

import hybridc
from hybridc.frontend.expand.group_query import CHECKED_COUNT
from hybridc.frontend.simplify import simplify
from tests.support.exact_reference import exact_session

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'


def parsed(text: str, opset: int = 17) -> onnx.ModelProto:
    """`g (inputs) => (outputs) {...}` in onnx's notation, with com.microsoft."""
    model = onnx.parser.parse_model(HEAD.format(opset=opset) + text)
    for i, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{i}"
    return model


def expanded(model: onnx.ModelProto, *, for_training: bool = False) -> onnx.ModelProto:
    """The model as the importer gets it."""
    return ir.to_proto(simplify(model, "model", None, for_training=for_training))


def assert_expansion_agrees(
    text: str,
    weights: Mapping[str, np.ndarray] = {},
    *,
    opset: int = 17,
    seed: int = 0,
    feeds: Mapping[str, np.ndarray] = {},
    tolerance: float = 1e-5,
    steps: int = 0,
    for_training: bool = False,
) -> onnx.ModelProto:
    """The expanded network has standard operators only, and gives what onnxruntime gives for the others.

    Within `tolerance` of the largest number; integers within `steps`, and at most one of 20 differs.
    Inputs that are not in `feeds` are drawn. Returns the network.
    """
    model, fed = _with_weights(text, weights, opset), dict(feeds)
    fed |= {v.name: _drawn(v, seed) for v in model.graph.input if v.name not in feeds}
    result = expanded(onnx.ModelProto.FromString(model.SerializeToString()), for_training=for_training)
    for node in result.graph.node:
        if node.op_type == CHECKED_COUNT:  # what onnxruntime is fed here is legal
            node.op_type = "Identity"
            del node.attribute[:]
    assert {node.domain for node in result.graph.node} <= {""}
    _assert_agree(_run(result, fed), _run(model, fed), tolerance, steps)
    return result


def assert_compiled_agrees(
    folder: Path,
    text: str,
    weights: Mapping[str, np.ndarray] = {},
    *,
    opset: int = 17,
    seed: int = 0,
    feeds: Mapping[str, np.ndarray] = {},
    tolerance: float = 1e-4,
    steps: int = 0,
) -> None:
    """The network, compiled for the CPU, gives what onnxruntime gives: as `assert_expansion_agrees`."""
    model, fed = _with_weights(text, weights, opset), dict(feeds)
    fed |= {v.name: _drawn(v, seed) for v in model.graph.input if v.name not in feeds}
    hybridc.compile(model, folder / "model.hyb", target="avx2")
    with hybridc.load(folder / "model.hyb") as session:
        _assert_agree(session.run(None, fed), _run(model, fed), tolerance, steps)


def _with_weights(text: str, weights: Mapping[str, np.ndarray], opset: int) -> onnx.ModelProto:
    model = parsed(text, opset)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights.items())
    return model


def _run(model: onnx.ModelProto, fed: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    return exact_session(model).run(None, dict(fed))


def _assert_agree(
    found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], tolerance: float, steps: int
) -> None:
    for value, reference in zip(found, wanted, strict=True):
        assert value.shape == reference.shape and value.dtype == reference.dtype
        if reference.dtype.kind == "f":
            scale = np.abs(reference.astype(np.float64)).max(initial=1e-30)
            np.testing.assert_allclose(value, reference, rtol=0, atol=tolerance * scale)
        else:
            apart = np.abs(value.astype(np.int64) - reference)
            assert apart.max(initial=0) <= steps
            assert np.count_nonzero(apart) <= 0.05 * apart.size


def _drawn(value: onnx.ValueInfoProto, seed: int) -> np.ndarray:
    kind = value.type.tensor_type
    random = np.random.default_rng([seed, *value.name.encode()])
    shape = [dim.dim_value for dim in kind.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if dtype.kind == "f":
        return random.standard_normal(shape).astype(dtype)
    low, high = (
        (0, 2) if dtype.kind == "b" else (0 if dtype.kind == "u" else -128, 256 if dtype.kind == "u" else 128)
    )
    return random.integers(low, high, shape).astype(dtype)


def assert_compiles(
    text: str, path: Path, *, opset: int = 17, feeds: Mapping[str, np.ndarray] = {}, tolerance: float = 1e-4
) -> None:
    """Compiled for avx2, into the file, the network gives what onnxruntime gives for the one as it is.

    Within `tolerance` of the largest number. Inputs that are not in `feeds` are drawn.
    """
    model = parsed(text, opset)
    fed = {v.name: _drawn(v, 0) for v in model.graph.input} | dict(feeds)
    reference = exact_session(model)
    hybridc.compile(model, path, target="avx2", plan_seconds=0.05)
    with hybridc.load(path) as session:
        found = session.run(None, fed)
    for value, wanted in zip(found, reference.run(None, fed), strict=True):
        scale = np.abs(wanted).max(initial=1e-30)
        np.testing.assert_allclose(value, wanted, rtol=0, atol=tolerance * scale)
