"""FlexAttention is what torch's flex_attention computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import parser

from hybridc.frontend import read_model
from tests.frontend.conftest import run_imported

torch = pytest.importorskip("torch")
flex_attention = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention

MODIFIERS: dict[str, tuple[str, Callable[..., object] | None]] = {
    "none": ("", None),
    "bias": ("Add (scores, Q)", lambda bias: lambda s, b, h, row, column: s + bias[row, column]),
    "cap": ("Tanh (scores)", lambda bias: lambda s, b, h, row, column: torch.tanh(s)),
}


@pytest.mark.parametrize("name", MODIFIERS)
@pytest.mark.parametrize(("heads", "shared"), [(3, 3), (6, 2)])
def test_scores_are_modified_by_what_a_graph_reads(
    name: str, heads: int, shared: int, rng: np.random.Generator
) -> None:
    """A graph may read what the network calls by a name that ONNX's own body has for something else."""
    text, modifier = MODIFIERS[name]
    graph = f", score_mod: graph = m (float[B,H,R,C] scores) => (float[B,H,R,C] o) {{ o = {text} }}"
    if not text:
        graph = ""
    model = parser.parse_model(
        '<ir_version: 13, opset_import: ["": 26, "ai.onnx.preview": 1]>'
        f"g (float[2,{heads},5,4] q, float[2,{shared},7,4] k, float[2,{shared},7,6] v, float[5,7] Q)"
        f" => (float[2,{heads},5,6] y)"
        f"{{ y = ai.onnx.preview.FlexAttention <scale: float = 0.7{graph}> (q, k, v) }}"
    )
    feeds = {
        value.name: rng.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim], np.float32)
        for value in model.graph.input
    }
    (y,) = run_imported(read_model(model), feeds)
    q, k, v, bias = (torch.from_numpy(feeds[each]) for each in ("q", "k", "v", "Q"))
    expected = flex_attention(
        q, k, v, score_mod=modifier and modifier(bias), scale=0.7, enable_gqa=heads != shared
    )
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-5, atol=1e-5)
