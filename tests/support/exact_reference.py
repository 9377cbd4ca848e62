"""onnxruntime as a reference of quantised networks, whatever processor it runs on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import onnx
import pytest

from hybridc.cli.support.reference import EXACT_INTEGERS
from hybridc.targets import cpu_flags

if TYPE_CHECKING:
    import onnxruntime

SATURATES = not cpu_flags() & {"avx512_vnni", "avx_vnni"}
"""Whether onnxruntime's products of uint8 and int8 do, but for a setting that its optimizer carries out."""
_INTEGER_PRODUCTS = re.compile(r"Q(Linear|Gemm|Attention)|.*Integer|DynamicQuantize(MatMul|LSTM)")


def exact_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session without optimizer, which moves roundings, unless products of integers need it to be exact."""
    ort = pytest.importorskip("onnxruntime")
    levels = ort.GraphOptimizationLevel
    if SATURATES and any(_INTEGER_PRODUCTS.match(node.op_type) for node in model.graph.node):
        try:
            return _session(model, levels.ORT_ENABLE_EXTENDED)
        except ort.capi.onnxruntime_pybind11_state.NotImplemented:
            pass  # it has no kernel for what the setting makes of int8 times int8, which never saturates
    return _session(model, levels.ORT_DISABLE_ALL)


def _session(
    model: onnx.ModelProto, level: onnxruntime.GraphOptimizationLevel
) -> onnxruntime.InferenceSession:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.graph_optimization_level = level
    settings.add_session_config_entry(*EXACT_INTEGERS)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
