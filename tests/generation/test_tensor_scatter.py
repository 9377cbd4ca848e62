"""Decoders whose new keys and values take their places by TensorScatter, against ONNX's own evaluator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import hybridc
from hybridc.errors import HybridcError
from hybridc.ir.plan import resident_pairs
from tests.support.machines import EAGER_GPU

CONTEXT, HEADS, DEPTH, WIDTH, VOCABULARY = 64, 2, 16, 32, 50
CACHES = {"pk": "past_key_values.0.key", "pv": "past_key_values.0.value"}
CACHES |= {"nk": "present.0.key", "nv": "present.0.value"}
pytestmark = pytest.mark.isa("avx2")


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    cache = f"float[1,{HEADS},{CONTEXT},{DEPTH}]"

    def split(name: str) -> str:
        return (
            f"{name}0 = MatMul (x, w{name}) {name}1 = Reshape ({name}0, shape)"
            f" {name} = Transpose <perm=[0,2,1,3]> ({name}1) "
        )

    model = onnx.parser.parse_model(f"""
    <ir_version: 11, opset_import: ["" : 24]>
    g (int64[1,n] ids, int64[1] start, bool[1,1,n,{CONTEXT}] mask, {cache} pk, {cache} pv)
      => (float[1,n,{VOCABULARY}] logits, {cache} nk, {cache} nv) {{
      x = Gather (table, ids) {split("q")} {split("k")} {split("v")}
      nk = TensorScatter (pk, k, start) nv = TensorScatter (pv, v, start)
      y = Attention (q, nk, nv, mask)
      y1 = Transpose <perm=[0,2,1,3]> (y) y2 = Reshape (y1, flat) logits = MatMul (y2, head)
    }}""")
    floats = {"table": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    floats |= {f"w{name}": (WIDTH, WIDTH) for name in "qkv"}
    weights = {name: (random.standard_normal(s) / 6).astype(np.float32) for name, s in floats.items()}
    weights |= {"shape": np.array([1, -1, HEADS, DEPTH]), "flat": np.array([1, -1, WIDTH])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights.items())
    for node in model.graph.node:
        for field in (node.input, node.output):
            field[:] = [CACHES.get(name, name) for name in field]
    for value in (*model.graph.input, *model.graph.output):
        value.name = CACHES.get(value.name, value.name)
    return model


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("target", ["avx2", "cuda+avx2"])
def test_rows_take_their_places_in_the_memory_of_the_past(
    model: onnx.ModelProto, target: str, length: int, tmp_path: Path
) -> None:
    has_gpu = target.startswith("cuda")
    made = hybridc.compile(
        model,
        tmp_path / "m.hyb",
        target=target,
        dims={"n": length},
        machine=EAGER_GPU,
        gpu_memory=["90%"] if has_gpu else None,
        plan_seconds=0.1,
    )
    graph, plan = made.graphs[-1], made.plans[-1]
    assert len(graph.caches) == 2
    if has_gpu:
        assert len(resident_pairs(graph, plan.steps)) == 2
    random = np.random.default_rng(length)
    shape = 1, HEADS, CONTEXT, DEPTH
    feeds: dict[str, np.ndarray] = {"ids": random.integers(0, VOCABULARY, (1, length))}
    for name in list(CACHES.values())[:2]:
        feeds[name] = random.standard_normal(shape).astype(np.float32)
    with hybridc.load(tmp_path / "m.hyb", emulate_gpu="64MiB" if has_gpu else None) as session:
        for start in (0, 17, CONTEXT - length):
            seen = np.arange(CONTEXT) <= start + np.arange(length)[:, None]
            fed = {**feeds, "start": np.array([start]), "mask": seen[None, None]}
            wanted = ReferenceEvaluator(model).run(None, fed)
            for one, other in zip(session.run(None, fed), wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
        for start in (-1, CONTEXT - length + 1):
            with pytest.raises(HybridcError, match=r"TensorScatter.*outside of") as caught:
                session.run(None, {**fed, "start": np.array([start])})
            assert caught.value.code == "HC560"
