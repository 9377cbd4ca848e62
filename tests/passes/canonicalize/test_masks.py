"""Masks are broadcast where they are read, and conditions that decide nothing go."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.program.program import Program, ProgramBuilder, operator_name, tensor_shape
from tests.support.programs import drawn, run_llvm

op = relax.op
BATCH, HEADS, TOKENS = 2, 3, 5


def masked_scores(*, is_causal: bool) -> Program:
    """Scores [BATCH, HEADS, TOKENS, TOKENS] that a mask of keys hides, as transformers' encoders have it."""
    scores = relax.Var("scores", relax.TensorType((BATCH, HEADS, TOKENS, TOKENS), "float32"))
    keys = relax.Var("keys", relax.TensorType((BATCH, 1, 1, TOKENS), "float32"))
    builder = ProgramBuilder([scores, keys])

    def emit(expr: relax.Expr) -> relax.Var:
        return builder.emit(expr, ("node",), "t")

    seen = np.tri(TOKENS, dtype=bool) if is_causal else np.ones((TOKENS, 1), bool)
    pairs = emit(op.logical_and(builder.weight(seen[None, None], "pairs"), emit(op.astype(keys, "bool"))))
    mask = emit(
        op.where(
            pairs,
            builder.weight(np.zeros((), np.float32), "shown"),
            builder.weight(np.full((), -np.inf, np.float32), "hidden"),
        )
    )
    return builder.finish([emit(op.add(scores, mask))])


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_has_the_axes_that_it_tells_apart(is_causal: bool) -> None:
    before = masked_scores(is_causal=is_causal)
    after = canonicalize(before)
    [choice] = [b for b in after.bindings if operator_name(b.value) == "where"]
    assert tensor_shape(choice.var) == (BATCH, 1, TOKENS if is_causal else 1, TOKENS)
    assert ("logical_and" in map(operator_name, (b.value for b in after.bindings))) == is_causal
    assert tensor_shape(after.outputs[0]) == (BATCH, HEADS, TOKENS, TOKENS)
    keys = np.array([1, 0, 1, 1, 0, 1, 1, 0, 0, 1], np.float32).reshape(BATCH, 1, 1, TOKENS)
    fed = drawn(0, BATCH, HEADS, TOKENS, TOKENS), keys
    (wanted,), (found,) = (run_llvm(p.module, *fed, *p.weights.values()) for p in (before, after))
    np.testing.assert_array_equal(found, wanted)


def test_an_output_keeps_its_shape() -> None:
    """The condition itself, broadcast by a constant that is true, or false."""
    x = relax.Var("x", relax.TensorType((1, TOKENS), "bool"))
    builder = ProgramBuilder([x])
    true = builder.weight(np.ones((TOKENS, 1), bool), "true")
    false = builder.weight(np.zeros((TOKENS, 1), bool), "false")
    made = [op.logical_and(true, x), op.logical_or(x, false), op.logical_and(x, false)]
    program = canonicalize(builder.finish([builder.emit(expr, ("node",), "t") for expr in made]))
    assert [operator_name(b.value) for b in program.bindings] == [
        "broadcast_to",
        "broadcast_to",
        "logical_and",
    ]
    assert all(tensor_shape(output) == (TOKENS, TOKENS) for output in program.outputs)
    assert [output.ty.dtype for output in program.outputs] == ["bool"] * 3


def test_other_broadcasts_stay_where_they_are() -> None:
    """Of numbers: which of two ways is faster depends on who else reads them."""
    x = relax.Var("x", relax.TensorType((1, TOKENS), "float32"))
    y = relax.Var("y", relax.TensorType((TOKENS, TOKENS), "float32"))
    builder = ProgramBuilder([x, y])
    wide = builder.emit(op.broadcast_to(x, (TOKENS, TOKENS)), ("node",), "wide")
    program = canonicalize(builder.finish([builder.emit(op.add(wide, y), ("node",), "t")]))
    assert [operator_name(b.value) for b in program.bindings] == ["broadcast_to", "add"]
