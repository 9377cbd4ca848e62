"""A model evaluated in float64, to tell whose rounding a difference between two float32 results is.

    python -m hybridc.cli.support.doubles MODEL.onnx INPUTS.npz OUTPUTS.npz

is what `double_run` starts, in a process that can be ended: ONNX Runtime has kernels of doubles for some
operators; where one is missing, ONNX's reference implementation evaluates the model, slowly.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from hybridc.scratch import scratch_folder

LIMIT_SECONDS = 60.0
"""Enough for networks of some hundred million multiplications by the reference implementation."""
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_TYPES = {"Cast": "to", "EyeLike": "dtype", "QuantizeLinear": "precision"}
"""Attributes that name a type of float."""


@dataclass(frozen=True, slots=True)
class Doubles:
    """What came of an evaluation in float64."""

    outputs: Mapping[str, np.ndarray] | None
    """None if there is none."""
    by: str = ""
    """What evaluated it; or why nothing could."""


def double_run(model: Path, feeds: Mapping[str, np.ndarray], outputs: Iterable[str]) -> Doubles:
    """Evaluate a model, whose inputs and outputs these are in its order, in float64."""
    with scratch_folder("hybridc-float64-") as folder:
        given, made = folder / "inputs.npz", folder / "outputs.npz"
        _write(given, feeds.values())
        command = [sys.executable, "-m", __name__, str(model), str(given), str(made)]
        try:
            ended = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="backslashreplace",
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Doubles(None, f"it takes more than {LIMIT_SECONDS:g} s")
        if ended.returncode != 0 or not made.exists():
            lines = ended.stderr.strip().splitlines() or [f"its process ended with {ended.returncode}"]
            return Doubles(None, lines[-1][:200])
        return Doubles(dict(zip(outputs, _read(made), strict=True)), ended.stdout.strip())


def _write(path: Path, arrays: Iterable[np.ndarray]) -> None:
    """Numbered: names of a model may be anything."""
    floats = (a if a.dtype.kind in "iub" else a.astype(np.float64) for a in arrays)
    np.savez(path, allow_pickle=False, **{f"a{i}": array for i, array in enumerate(floats)})


def _read(path: Path) -> list[np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return [archive[f"a{i}"] for i in range(len(archive.files))]


# ------------------------------------------------------------------------------------- the other process


def _main(model_path: str, inputs_path: str, outputs_path: str) -> int:
    model = onnx.load(model_path)
    to_doubles(model)
    weights = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in weights]
    feeds = dict(zip(names, _read(Path(inputs_path)), strict=True))
    by = "onnxruntime"
    try:
        outputs = _by_onnxruntime(model, feeds)
    except Exception:  # its errors share no base; most say that it has no kernel of doubles
        by, outputs = "onnx.reference", _by_reference(model, feeds)
    _write(Path(outputs_path), outputs)
    print(by)
    return 0


def _by_onnxruntime(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # as it is written
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, dict(feeds))]


def _by_reference(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Raises TypeError if an operator of the reference implementation rounds to float32."""
    from onnx.reference import ReferenceEvaluator

    results: Any = ReferenceEvaluator(model).run(None, dict(feeds), intermediate=True)
    for name, value in results.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "fV" and value.dtype.itemsize < 8:
            raise TypeError(f"onnx.reference computes {name!r} in {value.dtype}")
    return [np.asarray(results[value.name]) for value in model.graph.output]


def to_doubles(model: ModelProto) -> None:
    """Make every tensor of floats one of doubles, in place, and every type that the model names."""
    for value in (*model.graph.input, *model.graph.output):
        type_ = value.type.tensor_type
        if type_.elem_type in _FLOATS:
            type_.elem_type = TensorProto.DOUBLE
    for graph in (model.graph, *_subgraphs(model.graph.node)):
        for tensor in graph.initializer:
            _widen(tensor)
        del graph.value_info[:]
        for value in graph.output if graph is not model.graph else ():
            value.type.Clear()
    for function in model.functions:
        del function.value_info[:]
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    for nodes in (*bodies, *(graph.node for body in bodies for graph in _subgraphs(body))):
        for node in nodes:
            _widen_attributes(node)


def _subgraphs(nodes: Iterable[NodeProto]) -> Iterator[GraphProto]:
    for node in nodes:
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                if graph.node or graph.output:
                    yield graph
                    yield from _subgraphs(graph.node)


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        array = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _widen_attributes(node: NodeProto) -> None:
    kept: list[AttributeProto] = []
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            _widen(attribute.t)
        elif attribute.name == _TYPES.get(node.op_type) and attribute.i in _FLOATS:
            attribute.i = TensorProto.DOUBLE
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            value = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            attribute = helper.make_attribute("value", numpy_helper.from_array(np.array(value, np.float64)))
        kept.append(attribute)
    if node.op_type == "ConstantOfShape" and not kept:
        kept.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
    new = [AttributeProto.FromString(attribute.SerializeToString()) for attribute in kept]
    del node.attribute[:]
    node.attribute.extend(new)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
