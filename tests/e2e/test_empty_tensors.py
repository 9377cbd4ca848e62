"""Tensors without elements: a decoder's first past, and what is computed of nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import pytest

import hybridc
from hybridc import emulator

STEP = """<ir_version: 8, opset_import: ["" : 17]>
g (float[1,2,"past",4] p, float[1,2,1,4] k, float[1,2,1,4] q)
    => (float[1,2,"all",4] present, float[1,2,1,"all"] w, float[1,2,"past",4] old, float[1,2,4] s) {
    present = Concat <axis=2> (p, k)
    t = Transpose <perm=[0,1,3,2]> (present)
    dots = MatMul (q, t)
    w = Softmax (dots)
    old = Relu (p)
    s = ReduceMin <axes=[2], keepdims=0> (present)
}"""


@pytest.mark.parametrize("target", ["avx2", "cuda+avx2"])
def test_first_step_of_a_decoder_has_an_empty_past(tmp_path: Path, target: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if target.startswith("cuda"):
        emulator.start(1 << 24)
    model = onnx.parser.parse_model(STEP)
    hybridc.compile(model, tmp_path / "step.hyb", target=target, dims={"past": 0})
    random = np.random.default_rng(0)
    feeds = {
        "p": np.empty((1, 2, 0, 4), np.float32),
        "k": random.standard_normal((1, 2, 1, 4)).astype(np.float32),
        "q": random.standard_normal((1, 2, 1, 4)).astype(np.float32),
    }
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    with hybridc.load(tmp_path / "step.hyb") as session:
        assert session.get_inputs()[0].shape == [1, 2, 0, 4]
        for found, reference in zip(session.run(None, feeds), wanted, strict=True):
            assert found.shape == reference.shape
            np.testing.assert_allclose(found, reference, rtol=1e-6)


def test_network_of_nothing_but_empty_tensors(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float["n",3] x) => (float["n",3] y) { y = Exp (x) }'
    hybridc.compile(onnx.parser.parse_model(text), tmp_path / "e.hyb", target="avx2", shapes={"x": (0, 3)})
    with hybridc.load(tmp_path / "e.hyb") as session:
        (y,) = session.run(None, {"x": np.empty((0, 3), np.float32)})
    assert y.shape == (0, 3) and y.dtype == np.float32


def test_empty_input_that_many_read_or_that_is_a_result(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float["n",3] x, float[2,3] z) => (float["n",3] a, float["all",3] b, float["n",3] same) {
        a = Mul (x, x)
        b = Concat <axis=0> (x, z)
        same = Identity (x)
    }"""
    hybridc.compile(onnx.parser.parse_model(text), tmp_path / "e.hyb", target="avx2", dims={"n": 0})
    z = np.arange(6, dtype=np.float32).reshape(2, 3)
    with hybridc.load(tmp_path / "e.hyb") as session:
        a, b, same = session.run(None, {"x": np.empty((0, 3), np.float32), "z": z})
    assert a.shape == same.shape == (0, 3)
    np.testing.assert_array_equal(b, z)
