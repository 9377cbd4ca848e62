"""Decoders whose files are of 16-bit floats, keys and values among them, against onnxruntime in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

import hybridc
from tests.support.decoders import CONTEXT, logits_of, with_open_lengths
from tests.support.machines import EAGER_GPU

pytestmark = pytest.mark.isa("avx2")
SIZES: dict[str, Any] = {
    "sequence": [1, 8],
    "past_sequence_length": CONTEXT,
    "total_sequence_length": CONTEXT,
}
TOKENS = np.random.default_rng(2).integers(0, 200, 21).tolist()


def narrow(dtype: str) -> onnx.ModelProto:
    """The decoder as a file of float16 or bfloat16."""
    model = convert_float_to_float16(with_open_lengths(), disable_shape_infer=True)
    return _in_bfloat16(model) if dtype == "bfloat16" else model


def _in_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of float16 with the other type in its place."""
    old, new = TensorProto.FLOAT16, TensorProto.BFLOAT16
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type == old:
            bits = numpy_helper.to_array(tensor).astype(np.float32).astype(ml_dtypes.bfloat16).tobytes()
            tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, new, tensor.dims, bits, raw=True))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == old:
            value.type.tensor_type.elem_type = new
    for attribute in (a for node in graph.node if node.op_type == "Cast" for a in node.attribute):
        if attribute.name == "to" and attribute.i == old:
            attribute.i = new
    return model


_OFF = {"float16": 2e-3, "bfloat16": 2e-2}
"""Of logits, as a share of the greatest: some units in the last place of the type."""


@pytest.mark.parametrize(
    ("dtype", "kv_cache", "target"),
    [
        ("float16", None, "avx2"),
        ("float16", "int8", "avx2"),
        pytest.param("float16", "fp16", "avx2", marks=pytest.mark.slow),
        ("float16", "int8", "cuda+avx2"),
        ("bfloat16", None, "avx2"),
        pytest.param("bfloat16", "int8", "avx2", marks=pytest.mark.slow),
        pytest.param("bfloat16", None, "cuda+avx2", marks=pytest.mark.slow),
        ("bfloat16", "int8", "cuda+avx2"),
    ],
)
def test_logits_and_a_saved_cache(dtype: str, kv_cache: str | None, target: str, tmp_path: Path) -> None:
    *_, exact = logits_of(with_open_lengths(), TOKENS, np.asarray)
    on_gpu = target != "avx2"
    more: dict[str, Any] = {"machine": EAGER_GPU, "plan_seconds": 0.02} if on_gpu else {}
    path = tmp_path / "m.hyb"
    hybridc.compile(narrow(dtype), path, target=target, dims=SIZES, kv_cache=kv_cache, **more)
    off = (max(_OFF[dtype], 1e-2) if kv_cache == "int8" else _OFF[dtype]) * np.abs(exact).max()
    with hybridc.load_generation(path, emulate_gpu="64MiB" if on_gpu else None) as session:
        session.append([TOKENS[:-1]])
        session.save(tmp_path / "c.npz")
        found = session.append([TOKENS[-1:]])[0]
        np.testing.assert_allclose(found, exact, rtol=0, atol=off)
        session.rewind(0)
        session.restore(tmp_path / "c.npz")
        np.testing.assert_array_equal(session.append([TOKENS[-1:]])[0], found)


@pytest.mark.parametrize("kv_cache", [None, "int8"])
def test_caches_have_the_type_of_the_file_or_the_one_asked_for(kv_cache: str | None, tmp_path: Path) -> None:
    hybridc.compile(
        narrow("float16"), tmp_path / "m.hyb", target="avx2", dims={**SIZES, "sequence": 1}, kv_cache=kv_cache
    )
    with hybridc.load(tmp_path / "m.hyb") as session:
        ports = (*session.get_inputs(), *session.get_outputs())
        caches = {port.type for port in ports if port.name.startswith(("past", "present"))}
    assert caches == {"tensor(int8)" if kv_cache else "tensor(float16)"}


@pytest.mark.parametrize("target", ["avx2", "cuda+avx2"])
def test_a_step_reads_no_more_of_a_cache_than_is_filled(target: str, tmp_path: Path) -> None:
    """What is not a number behind the positions that are there would spoil every sum that it has part in."""
    on_gpu, path = target != "avx2", tmp_path / "m.hyb"
    more: dict[str, Any] = {"machine": EAGER_GPU, "plan_seconds": 0.02} if on_gpu else {}
    hybridc.compile(narrow("float16"), path, target=target, dims={**SIZES, "sequence": 1}, **more)
    with hybridc.load(path, emulate_gpu="64MiB" if on_gpu else None) as session:
        feeds: dict[str, np.ndarray] = {}
        for port in session.get_inputs():
            if port.name.startswith("past"):
                feeds[port.name] = np.full(port.shape, np.nan, np.float16)
                feeds[port.name][:, :, :128] = 0.25  # a turn of a block on a GPU
        feeds["input_ids"] = np.array([[5]])
        feeds["attention_mask"] = (np.arange(CONTEXT) < 10).astype(np.int64)[None]
        if any(port.name == "position_ids" for port in session.get_inputs()):
            feeds["position_ids"] = np.array([[9]])
        logits = session.run(["logits"], feeds)[0]
    assert np.isfinite(logits).all()
