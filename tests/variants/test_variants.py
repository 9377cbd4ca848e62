"""Networks as onnxruntime's tools write them, compiled: they give what onnxruntime gives for the file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from hybridc.models import MODELS
from tests.support.expansion import expanded
from tests.variants.judge import AGREES, DIFFERS, FAILED, NOT_MADE, judge
from tests.variants.tools import TOOLS, fed

pytest.importorskip("torch")
from tests.variants.networks import NETWORKS, made

FUSED = {
    ("bert", "bert"): {"BiasGelu", "SkipLayerNormalization"},
    ("bert", "bert with FastGelu"): {"FastGelu"},
    ("bert", "extended"): {"FusedMatMul", "Gelu", "SkipLayerNormalization"},
    ("vit", "bert"): {"Attention", "SkipLayerNormalization"},
    ("vit", "bert with MultiHeadAttention"): {"MultiHeadAttention"},
    ("encoder", "bert, dynamic int8"): {"QAttention"},
    ("torch decoder", "bert"): {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"},
    ("torch decoder", "extended"): {"QuickGelu", "SimplifiedLayerNormalization"},
    ("torch unet", "unet"): {"GroupNorm", "NhwcConv"},
}
"""Operators that a tool puts into a network, among others."""


@pytest.mark.parametrize(("network", "tool"), FUSED)
def test_fused_operators_are_expanded(network: str, tool: str, tmp_path: Path) -> None:
    original = made(network)
    feeds = fed(original, 3)
    wanted = run(original, feeds)
    fused = TOOLS[tool](original, tmp_path)
    assert FUSED[network, tool] <= {node.op_type for node in fused.graph.node}
    result = expanded(fused)
    assert {node.domain for node in result.graph.node} == {""}
    scale = np.abs(wanted).max()
    # the network itself is changed: rounded to integers of 8 bits, or tanh put for erf
    tolerance = 0.1 if "int8" in tool else 3e-2 if "Gelu" in tool else 1e-5
    np.testing.assert_allclose(run(result, feeds), wanted, rtol=0, atol=tolerance * scale)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The first result, by onnxruntime."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def test_quantized_attention_agrees(tmp_path: Path) -> None:
    network = MODELS["vit"](size=16, patch=8, width=64, depth=1, heads=4, mlp=64, classes=10)
    assert judge("vit", "bert, dynamic int8", network, tmp_path).outcome == AGREES


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_every_tool(network: str, tmp_path: Path) -> None:
    """At least nine of ten files compile, nothing is wrong, and what is refused is refused by name."""
    original = made(network)
    verdicts = [judge(network, tool, original, tmp_path) for tool in TOOLS]
    counts = Counter(verdict.outcome for verdict in verdicts)
    wrong = [verdict for verdict in verdicts if verdict.outcome in (DIFFERS, FAILED)]
    assert not wrong
    assert counts[AGREES] >= 0.9 * (len(verdicts) - counts[NOT_MADE])
