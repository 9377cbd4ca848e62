"""What a network computes several times is computed once, unless a reader does it on the way."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.canonicalize.sharing import LIMIT_BYTES, share_equal
from hybridc.passes.program.program import Program, ProgramBuilder, operator_name
from tests.support.programs import drawn, run_llvm

op = relax.op


def operators(program: Program) -> list[str]:
    return [operator_name(binding.value) for binding in program.bindings]


def layers(build, *shape, of=2):
    """The sum of what each of several layers computes of an input, with a weight of its own of one value."""
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    builder = ProgramBuilder([x])
    total = None
    for i in range(of):
        weight = builder.weight(drawn(1, shape[-1]), f"weight_{i}")
        made = build(lambda expr, i=i: builder.emit(expr, (f"node_{i}",), "t"), x, weight)
        total = made if total is None else builder.emit(op.add(total, made), ("sum",), "t")
    return builder.finish([total])


def chain(e, x, weight):
    return e(op.tanh(e(op.reshape(e(op.multiply(x, weight)), (3, 4, 5)))))


def test_equal_chains_are_one():
    before = layers(chain, 3, 20)
    after = share_equal(before)
    assert operators(after) == ["multiply", "reshape", "tanh", "add"]
    assert [after.origins[b.var.name] for b in after.bindings] == [("node_0",)] * 3 + [("sum",)]
    x = drawn(0, 3, 20)
    (wanted,), (found,) = (run_llvm(p.module, x, *p.weights.values()) for p in (before, after))
    np.testing.assert_array_equal(found, wanted)


def test_other_attributes_and_numbers_are_others():
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    builder = ProgramBuilder([x])
    made = [
        builder.emit(expr, ("node",), "t")
        for expr in (
            op.sum(x, [0]),
            op.sum(x, [1]),
            op.add(x, relax.const(1.0, "float32")),
            op.add(x, relax.const(2.0, "float32")),
            op.subtract(x, relax.const(1.0, "float32")),
        )
    ]
    assert len(share_equal(builder.finish(made)).bindings) == 5


def test_results_of_one_split_are_one():
    def build(e, x, weight):
        parts = e(op.split(x, 2, axis=0))
        return e(op.add(e(relax.TupleGetItem(parts, 0)), e(relax.TupleGetItem(parts, 1))))

    names = [type(b.value).__name__ for b in share_equal(layers(build, 4, 6)).bindings]
    assert names == ["Call", "TupleGetItem", "TupleGetItem", "Call", "Call"]


@pytest.mark.parametrize(
    "build",
    [
        lambda e, x, weight: e(op.permute_dims(x, [1, 0])),
        lambda e, x, weight: e(op.broadcast_to(x, (5, 4, 6))),
    ],
    ids=["permutation", "broadcast"],
)
def test_what_readers_do_in_place_stays_with_each(build):
    assert len(share_equal(layers(build, 4, 6)).bindings) == 3


def test_large_results_are_computed_again():
    def build(e, x, weight):
        return e(op.exp(x))

    row = LIMIT_BYTES // 4
    assert operators(share_equal(layers(build, 1, row))) == ["exp", "add"]
    assert operators(share_equal(layers(build, 1, row + 1))) == ["exp", "exp", "add"]
    assert operators(share_equal(layers(build, 1, row + 1), LIMIT_BYTES + 4)) == ["exp", "add"]


def test_outputs_may_be_one():
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    builder = ProgramBuilder([x])
    made = [builder.emit(op.exp(x), (name,), name) for name in "ab"]
    after = share_equal(builder.finish(made))
    assert operators(after) == ["exp"]
    assert len(after.outputs) == 2
