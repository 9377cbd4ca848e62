"""Maxima and minima of NaN, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from tvm import relax, s_tir, te, tirx

import hybridc
from hybridc.passes.program.legalize import LEGALIZATIONS
from hybridc.passes.program.nan_semantics import with_infinite_bounds, with_propagated_nan
from hybridc.targets import native_isa
from tests.support.programs import run_llvm

SPECIAL = np.array([np.nan, 1, -np.inf, -2.5, np.inf, -0.0, 0.25, np.nan], np.float32)


def test_nan_passes_through_relu_clip_max_and_min(tmp_path: Path) -> None:
    x, y = np.repeat(SPECIAL, 8), np.tile(SPECIAL, 8)  # every pair
    low, high = (helper.make_tensor(name, TensorProto.FLOAT, (), [v]) for name, v in (("l", -1), ("h", 1)))
    nodes = [
        helper.make_node("Relu", ["x"], ["relu"]),
        helper.make_node("Clip", ["x", "l", "h"], ["clip"]),
        helper.make_node("Max", ["x", "y"], ["max"]),
        helper.make_node("Min", ["x", "y"], ["min"]),
        helper.make_node("Add", ["x", "y"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["relu_of_sum"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in "xy"]
    outputs = ["relu", "clip", "max", "min", "relu_of_sum"]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in outputs]
    graph = helper.make_graph(nodes, "extrema", inputs, ports, [low, high])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, "y": y})
    hybridc.compile(model, tmp_path / "model.hyb", target=native_isa().name)
    with hybridc.load(tmp_path / "model.hyb") as session:
        results = session.run(None, {"x": x, "y": y})
    for name, result, reference in zip(outputs, results, expected, strict=True):
        np.testing.assert_array_equal(result, reference, err_msg=name)


def test_maxima_of_integers_and_those_of_reductions_keep_their_form() -> None:
    x = te.placeholder((4, 8), "float32", name="x")
    k = te.reduce_axis((0, 8), "k")
    reduced = te.create_prim_func([x, te.compute((4,), lambda i: te.max(x[i, k], axis=k))])
    n = te.placeholder((4,), "int32", name="n")
    integers = te.create_prim_func([n, te.compute((4,), lambda i: tirx.max(n[i], 0))])
    for function in (reduced, integers):
        assert with_propagated_nan(function).script() == function.script()


def test_maxima_of_reductions_begin_at_minus_infinity() -> None:
    x = te.placeholder((4, 8), "float32", name="x")
    k = te.reduce_axis((0, 8), "k")
    function = te.create_prim_func([x, te.compute((4,), lambda i: te.max(x[i, k], axis=k), name="top")])
    schedule = s_tir.Schedule(with_infinite_bounds(function))
    assert float(schedule.get(schedule.get_sblock("top")).init.value.value) == -np.inf


def test_whether_a_number_is_finite_reads_it_once() -> None:
    x = relax.Var("x", relax.TensorType(SPECIAL.shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(relax.Tuple([builder.emit(relax.op.isfinite(x))]))
    module = relax.transform.LegalizeOps(dict(LEGALIZATIONS))(builder.get())
    [function] = [f for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]
    *_, computed = function.script().strip().splitlines()
    assert computed.count(f"{function.params[0].name}[v_i0]") == 1
    np.testing.assert_array_equal(run_llvm(module, SPECIAL)[0], np.isfinite(SPECIAL))
