"""The benchmark of decoders: the file that llama.cpp gets, and who a row's peers are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridc import models

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import pages.decode as imported

    yield imported
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("decode", "common", "pages"):
            del sys.modules[name]


def row(engine: str, arithmetic: str, ms: float) -> dict[str, Any]:
    point = {"context": 128, "prompt": 128, "threads": 1, "decode_ms": ms, "prefill_ms": 10 * ms}
    return {"engine": engine, "arithmetic": arithmetic, "read_share": 0.5, **point}


def test_peers_without_bf16_stand_in_with_exact_ones(pages: Any) -> None:
    rows = [
        row("onnxruntime", "exact", 6.0),
        row("openvino", "exact", 5.0),
        row("hybridc", "exact", 2.0),
        row("openvino", "bf16", 4.0),
        row("hybridc", "bf16", 1.0),
    ]
    exact, bf16 = pages.decode_points(rows)
    assert pages.gain(exact.tokens) == 2.5
    assert bf16.tokens == {"hybridc": 1.0, "onnxruntime": 6.0, "openvino": 4.0}
    assert pages.gain(bf16.prompts) == 4.0


def test_gguf_has_the_weights_of_the_model(pages: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from decode.gguf_file import write_gguf

    shape: dict[str, Any] = {
        "layers": 1,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "feed_forward": 96,
        "vocabulary": 50,
    }
    models.export("llama", tmp_path / "m.onnx", **shape, context=32)
    write_gguf(tmp_path / "m.onnx", tmp_path / "m.gguf", heads=4, kv_heads=2, context=32)
    read = {
        t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors
    }
    found = weights(tmp_path / "m.onnx")
    for name, number in (
        ("blk.0.attn_output", 1),
        ("blk.0.ffn_gate", 2),
        ("blk.0.ffn_down", 4),
        ("output", 5),
    ):
        # scales are rounded to float16
        np.testing.assert_allclose(read[f"{name}.weight"], found[number], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(read["blk.0.attn_v.weight"], found[0][-32:], rtol=1e-3, atol=1e-6)
    # halves of a head become neighbours: rows 0 and 8 of 16
    np.testing.assert_allclose(read["blk.0.attn_q.weight"][:2], found[0][[0, 8]], rtol=1e-3, atol=1e-6)


def weights(path: Path) -> dict[int, np.ndarray]:
    """Float32 [columns, depth] of each product, by its number, as ONNX defines MatMulNBits."""
    import onnx
    from onnx import numpy_helper

    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    made = {}
    for number in range(6):
        codes, scales = found[f"product_{number}.weight"], found[f"product_{number}.scales"]
        elements = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], 32)
        floats = (elements.astype(np.float32) - 8) * scales.reshape(*codes.shape[:2], 1)
        made[number] = floats.reshape(len(codes), -1)
    return made
