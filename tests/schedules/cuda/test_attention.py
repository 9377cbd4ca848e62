"""Attention of drawn sizes on the emulated GPU, beside numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.fuse.attention import Attention, TransposedOperand, attention_function
from hybridc.schedules.cuda.attention.attention import attention
from hybridc.schedules.rule import Request
from tests.schedules.cuda.harness import TARGET, Case, check


def drawn(
    generator: np.random.Generator, sizes: tuple[int, int, int, int], depth: int, width: int, mask: str
) -> Case:
    """Attention of `[batch, position, heads, depth]` tensors with scores / 8 and a mask."""
    batch, rows, columns, heads = sizes

    def tensor(name: str, *shape: int) -> relax.Var:
        return relax.Var(name, relax.TensorType(shape, "float32"))

    scores, scaled = (tensor(name, batch, heads, rows, columns) for name in ("scores", "scaled"))
    steps = [relax.op.divide(scores, relax.const(8.0, "float32"))]
    hidden = {
        "none": np.zeros((1, 1, 1, 1)),
        "keys": np.where(generator.random((batch, 1, 1, columns)) < 0.3, -np.inf, 0),
        "causal": np.triu(np.full((rows, columns), -np.inf), 1),
        # whole tiles of keys in front are masked
        "late": np.where(np.arange(columns) < columns - 2, -np.inf, 0).reshape(1, 1, 1, columns),
    }[mask].astype("float32")
    if mask == "keys":
        hidden[..., 0] = 0
    if mask != "none":
        steps.append(relax.op.add(scaled, tensor("mask", *hidden.shape)))
    match = Attention(
        query=TransposedOperand(tensor("q", batch, rows, heads, depth), (0, 2, 1, 3)),
        key=TransposedOperand(tensor("k", batch, columns, heads, depth), (0, 2, 3, 1)),
        value=TransposedOperand(tensor("v", batch, columns, heads, width), (0, 2, 1, 3)),
        steps=tuple(steps),
        scores=scores,
        result_axes=(0, 2, 1, 3),
        members=(scores, scaled),
    )
    q, k, v = (
        generator.standard_normal((batch, n, heads, w)).astype("float32")
        for n, w in ((rows, depth), (columns, depth), (columns, width))
    )
    wide = [x.astype("float64").transpose(0, 2, 1, 3) for x in (q, k, v)]
    logits = wide[0] @ wide[1].transpose(0, 1, 3, 2) / 8 + hidden
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = (weights / weights.sum(-1, keepdims=True) @ wide[2]).transpose(0, 2, 1, 3)
    inputs = [q, k, v] if mask == "none" else [q, k, v, hidden]
    function = attention_function(match)
    return Case(function, inputs, expected, attention.__name__, 4e-6)


@pytest.mark.parametrize("seed", range(2))
def test_attention_of_drawn_sizes(seed: int) -> None:
    generator = np.random.default_rng(seed)
    cases = {}
    for mask in ("none", "keys", "causal", "late"):
        batch, heads = (int(e) for e in generator.integers(1, 3, 2))
        rows, columns = int(generator.integers(8, 70)), int(generator.integers(2, 70))
        depth, width = (int(e) for e in generator.choice([4, 16, 20, 32, 36, 64], 2))
        if mask == "causal":
            columns = max(rows, columns)
        cases[f"attention_{mask}"] = drawn(generator, (batch, rows, columns, heads), depth, width, mask)
    check(cases)


def test_rows_of_a_thread_grow_with_the_number_of_blocks() -> None:
    generator = np.random.default_rng(5)
    check(
        {
            "many": drawn(generator, (1, 37, 33, 163), 8, 4, "keys"),
            "more": drawn(generator, (1, 70, 40, 81), 4, 8, "none"),
        }
    )


@pytest.mark.parametrize(("rows", "depth"), [(7, 16), (16, 18), (16, 132)])
def test_other_sizes_are_left_to_others(rows: int, depth: int) -> None:
    case = drawn(np.random.default_rng(0), (1, rows, 8, 1), depth, 16, "none")
    assert attention(Request(case.function, frozenset(), TARGET)) is None
