"""A network before and after its operators are expanded, both run by onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime

import hybridc
from hybridc.frontend.expand.appended import APPENDED, CHECKED_COUNT
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
    _write_appended_rows(result)
    assert {node.domain for node in result.graph.node} <= {"", "test"}
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
    """What onnxruntime gives. A present that may have the past's buffer has it, as a cache that stays in
    place: then what is behind the positions that count is the past's, else zeros.
    """
    session, feeds = exact_session(model), dict(fed)
    pairs = _shared_caches(model)
    if not pairs:
        return session.run(None, feeds)
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for port in session.get_outputs():
        if port.name in pairs:
            binding.bind_ortvalue_output(port.name, values[pairs[port.name]])
        else:
            binding.bind_output(port.name)
    session.run_with_iobinding(binding)
    return [value.numpy() for value in binding.get_outputs()]


def _shared_caches(model: onnx.ModelProto) -> dict[str, str]:
    """Of GroupQueryAttention, the outputs that may have an input's buffer, with that input."""
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    pairs = {
        new: old for node in nodes for old, new in zip(node.input[3:5], node.output[1:3], strict=True) if old
    }
    return {new: old for new, old in pairs.items() if shapes.get(new) == shapes.get(old)}


def _write_appended_rows(model: onnx.ModelProto) -> None:
    """Make functions of standard operators of the rows that take their places in a cache."""
    if any(node.op_type == APPENDED for node in model.graph.node):
        model.opset_import.append(onnx.helper.make_opsetid("test", 1))
        model.functions.append(onnx.parser.parse_function(_APPENDED_ROWS))
    for node in model.graph.node:
        if node.op_type == APPENDED:
            node.domain = "test"


_APPENDED_ROWS = """
<opset_import: ["" : 17], domain: "test">
AppendedRows (past, new, before) => (present)
{
  zero = Constant <value = int64 {0}> ()
  one = Constant <value = int64 {1}> ()
  axis = Constant <value = int64[1] {2}> ()
  rest = Constant <value = int64[4] {1, 1, -1, 1}> ()
  first = Cast <to = 7> (before)
  shape = Shape (past)
  kept4 = Gather (shape, axis)
  kept = Squeeze (kept4)
  new_shape = Shape (new)
  length4 = Gather (new_shape, axis)
  length = Squeeze (length4)
  flat = Range (zero, kept, one)
  positions = Reshape (flat, rest)
  row = Sub (positions, first)
  below = Less (row, zero)
  above = GreaterOrEqual (row, length)
  outside = Or (below, above)
  last = Sub (length, one)
  capped = Min (row, last)
  place = Max (capped, zero)
  every = Expand (place, shape)
  moved = GatherElements <axis = 2> (new, every)
  present = Where (outside, past, moved)
}
"""


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
    hybridc.compile(model, path, target="avx2", plan_seconds=0.05)
    with hybridc.load(path) as session:
        found = session.run(None, fed)
    for value, wanted in zip(found, _run(model, fed), strict=True):
        scale = np.abs(wanted).max(initial=1e-30)
        np.testing.assert_allclose(value, wanted, rtol=0, atol=tolerance * scale)
