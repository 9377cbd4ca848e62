"""What the emulated GPU counts of compiled kernels is what their machine code says."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc import emulator
from hybridc.emulator import launches_of_steps
from hybridc.errors import DeviceError
from hybridc.machine import gpu_named
from hybridc.report.accesses import by_function

ROOT = Path(__file__).parents[2]


def small_model() -> onnx.ModelProto:
    """A product, two transpositions, a concatenation and a softmax, each from inputs of its own."""
    shapes = {
        "a": (256, 96),
        "b": (128, 96),
        "c": (64, 12, 64),
        "d": (100, 32),
        "e": (100, 96),
        "f": (192, 200),
    }
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    weight = np.random.default_rng(0).standard_normal((96, 256)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["a", "w"], ["y0"]),
        helper.make_node("Transpose", ["b"], ["y1"], perm=[1, 0]),
        helper.make_node("Transpose", ["c"], ["y2"], perm=[1, 0, 2]),
        helper.make_node("Concat", ["d", "e"], ["y3"], axis=1),
        helper.make_node("Softmax", ["f"], ["y4"]),
    ]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(len(nodes))]
    graph = helper.make_graph(nodes, "small", inputs, outputs, [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_counts_agree_with_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    suite, gates = (importlib.import_module(f"gpu_model.{name}") for name in ("suite", "gates"))
    monkeypatch.setitem(suite.SINGLE_KERNELS, "small", small_model)
    emulator.start(1 << 30)
    gpu = gpu_named("rtx-3090")
    try:
        made = suite.kernels_of_network("small", gpu)
    except DeviceError:
        pytest.skip("nvdisasm is not installed")
    static = {each.kernel.function: [(gates._counters(c, gpu)[0], c) for c in each.launches] for each in made}

    onnx.save(small_model(), tmp_path / "small.onnx")
    options: dict[str, Any] = {"target": "cuda:sm_86+avx2", "machine": "rtx-3090"}
    hybridc.compile(tmp_path / "small.onnx", tmp_path / "small.hyb", pins={"*": "gpu"}, **options)
    with hybridc.load(tmp_path / "small.hyb") as session:
        feeds = {i.name: np.ones(i.shape, np.float32) for i in session.get_inputs()}
        launches = emulator.count_launches(lambda: session.measure(feeds))
        graph, plan = session.artifact.graph, session.artifact.plan
        rows = by_function(graph, plan, launches_of_steps(graph, plan, launches))
    assert {row.function for row in rows} == set(static) and len(rows) == 5
    for row in rows:
        found, counters = row.accesses, static[row.function]

        def total(name: str, counters: list[Any] = counters) -> float:
            return sum(getattr(each, name) * launch.launch.blocks for each, launch in counters)

        # nvcc keeps more in registers than g++, so totals may differ
        sectors = found.read_sectors + found.written_sectors
        least = found.least_read_sectors + found.least_written_sectors
        assert sectors == pytest.approx(total("sectors"), rel=0.1), row.function
        assert sectors / least == pytest.approx(total("sectors") / total("least_sectors"), rel=0.05)
        if found.wavefronts:
            factor = total("wavefronts") / total("least_wavefronts")
            assert found.bank_conflict_factor == pytest.approx(factor, rel=0.05), row.function
