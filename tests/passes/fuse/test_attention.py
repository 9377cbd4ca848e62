from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.fuse.attention import fuse_attention
from hybridc.passes.program.program import Program, ProgramBuilder, operator_name, tensor_shape
from tests.support.programs import drawn, run_llvm


class Network:
    """Writes a program around one attention."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.inputs = [relax.Var(f"x{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
        self.builder = ProgramBuilder(self.inputs)

    def emit(self, expr: relax.Expr, name: str = "v") -> relax.Var:
        return self.builder.emit(expr, (f"node_{name}",), name)

    def heads(self, x: relax.Var, *axes: int) -> relax.Var:
        return self.emit(relax.op.permute_dims(x, axes), "heads")

    def program(self, *outputs: relax.Var) -> Program:
        return self.builder.finish(list(outputs))


def operators(program: Program) -> list[str]:
    return [operator_name(b.value) for b in program.bindings]


def check(before: Program) -> Program:
    """The program with its attention fused, after a check that it computes the same."""
    after = fuse_attention(before)
    arguments = [drawn(i, *tensor_shape(x)) for i, x in enumerate(before.main.params)]
    assert not before.weights
    for got, want in zip(
        run_llvm(after.module, *arguments), run_llvm(before.module, *arguments), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    return after


def test_transpositions_scale_and_mask_join_one_kernel():
    net = Network((2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 4), (2, 1, 1, 7))
    q, k, v, mask = net.inputs
    scores = net.emit(relax.op.matmul(net.heads(q, 0, 2, 1, 3), net.heads(k, 0, 2, 3, 1)), "scores")
    scaled = net.emit(relax.op.divide(scores, relax.const(8.0, "float32")), "scale")
    masked = net.emit(relax.op.add(scaled, mask), "mask")
    weights = net.emit(relax.op.nn.softmax(masked, axis=-1), "softmax")
    context = net.emit(relax.op.matmul(weights, net.heads(v, 0, 2, 1, 3)), "context")
    after = check(net.program(net.heads(context, 0, 2, 1, 3)))
    assert operators(after) == ["attention"]
    (origins,) = after.origins.values()
    assert {"node_scores", "node_scale", "node_mask", "node_softmax", "node_context"} <= set(origins)


def test_plain_operands_of_three_axes_and_a_mask_in_front():
    net = Network((4, 5, 8), (4, 8, 7), (4, 7, 6), (5, 7))
    q, k, v, mask = net.inputs
    scores = net.emit(relax.op.matmul(q, k))
    masked = net.emit(relax.op.subtract(mask, net.emit(relax.op.multiply(scores, scale()))))
    weights = net.emit(relax.op.nn.softmax(masked, axis=-1))
    assert operators(check(net.program(net.emit(relax.op.matmul(weights, v))))) == ["attention"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_scores_that_a_condition_replaces_join_it(is_kept):
    net = Network((2, 3, 5, 8), (2, 3, 8, 7), (2, 3, 7, 8), (2, 1, 1, 7))
    q, k, v, mask = net.inputs
    scores = net.emit(relax.op.matmul(q, k))
    condition = net.emit(relax.op.less(mask, relax.const(0.5, "float32")), "condition")
    lowest = relax.const(-np.inf, "float32")
    choices = (scores, lowest) if is_kept else (lowest, scores)
    masked = net.emit(relax.op.where(condition, *choices))
    weights = net.emit(relax.op.nn.softmax(masked, axis=-1))
    after = check(net.program(net.emit(relax.op.matmul(weights, v))))
    assert operators(after) == ["less", "astype", "attention"]


def scale() -> relax.Expr:
    return relax.const(0.3, "float32")


def test_equal_attentions_share_one_function():
    net = Network((1, 2, 5, 8), (1, 2, 8, 5))
    x, k = net.inputs
    for _ in range(2):
        weights = net.emit(relax.op.nn.softmax(net.emit(relax.op.matmul(x, k)), axis=-1))
        x = net.emit(relax.op.matmul(weights, x))
    after = check(net.program(x))
    assert operators(after) == ["attention", "attention"] and len(after.functions) == 1


@pytest.mark.parametrize("kept", ["scores", "weights"])
def test_scores_that_somebody_else_reads_remain_a_tensor(kept):
    net = Network((1, 2, 5, 8), (1, 2, 8, 5))
    x, k = net.inputs
    scores = net.emit(relax.op.matmul(x, k))
    weights = net.emit(relax.op.nn.softmax(scores, axis=-1))
    context = net.emit(relax.op.matmul(weights, x))
    after = fuse_attention(net.program(context, {"scores": scores, "weights": weights}[kept]))
    assert operators(after) == ["matmul", "softmax", "matmul"]


def test_a_transposition_that_somebody_else_reads_stays():
    net = Network((1, 5, 2, 8))
    heads = net.heads(net.inputs[0], 0, 2, 1, 3)
    keys = net.emit(relax.op.permute_dims(heads, (0, 1, 3, 2)))
    weights = net.emit(relax.op.nn.softmax(net.emit(relax.op.matmul(heads, keys)), axis=-1))
    after = check(net.program(net.emit(relax.op.matmul(weights, heads))))
    assert operators(after) == ["permute_dims", "attention"]


def test_softmax_over_another_axis_is_no_attention():
    net = Network((1, 2, 5, 8), (1, 2, 8, 5))
    x, k = net.inputs
    weights = net.emit(relax.op.nn.softmax(net.emit(relax.op.matmul(x, k)), axis=2))
    after = fuse_attention(net.program(net.emit(relax.op.matmul(weights, x))))
    assert operators(after) == ["matmul", "softmax", "matmul"]


def repeated(net: Network, x: relax.Var, times: int) -> relax.Var:
    """Heads of keys, axis 1, each so many times."""
    batch, heads, *rest = tensor_shape(x)
    apart = net.emit(relax.op.expand_dims(x, 2))
    longer = net.emit(relax.op.broadcast_to(apart, (batch, heads, times, *rest)))
    return net.emit(relax.op.reshape(longer, (batch, heads * times, *rest)))


def test_heads_that_are_repeated_are_not_copied():
    net = Network((2, 5, 6, 8), (2, 7, 2, 8), (2, 7, 2, 4))
    q = net.heads(net.inputs[0], 0, 2, 1, 3)
    k, v = (repeated(net, net.heads(x, 0, 2, 1, 3), 3) for x in net.inputs[1:])
    scores = net.emit(relax.op.matmul(q, net.emit(relax.op.permute_dims(k, (0, 1, 3, 2)))))
    weights = net.emit(relax.op.nn.softmax(scores, axis=-1))
    after = check(net.program(net.emit(relax.op.matmul(weights, v))))
    assert operators(after) == ["attention"]


def test_positions_that_are_repeated_one_after_the_other_stay():
    net = Network((1, 6, 5, 8), (1, 2, 8, 7), (1, 6, 7, 4))
    q, k, v = net.inputs
    apart = net.emit(relax.op.expand_dims(k, 1))  # in front of the heads: 0 1 0 1 0 1
    longer = net.emit(relax.op.broadcast_to(apart, (1, 3, 2, 8, 7)))
    k = net.emit(relax.op.reshape(longer, (1, 6, 8, 7)))
    weights = net.emit(relax.op.nn.softmax(net.emit(relax.op.matmul(q, k)), axis=-1))
    after = check(net.program(net.emit(relax.op.matmul(weights, v))))
    assert operators(after) == ["expand_dims", "broadcast_to", "reshape", "attention"]


def test_one_head_of_keys_is_that_of_all():
    net = Network((2, 3, 5, 8), (2, 1, 8, 7), (2, 1, 7, 4))
    q, k, v = net.inputs
    v = net.emit(relax.op.broadcast_to(v, (2, 3, 7, 4)))
    weights = net.emit(relax.op.nn.softmax(net.emit(relax.op.matmul(q, k)), axis=-1))
    after = check(net.program(net.emit(relax.op.matmul(weights, v))))
    assert operators(after) == ["attention"]


def test_weights_that_are_not_a_number_count_as_zero():
    net = Network((1, 2, 5, 8), (1, 2, 8, 6), (1, 2, 6, 4), (1, 1, 5, 6))
    q, k, v, mask = net.inputs
    masked = net.emit(relax.op.add(net.emit(relax.op.matmul(q, k)), mask))
    weights = net.emit(relax.op.nn.softmax(masked, axis=-1))
    missing = net.emit(relax.op.isnan(weights))
    weights = net.emit(relax.op.where(missing, relax.const(0.0, "float32"), weights))
    before = net.program(net.emit(relax.op.matmul(weights, v)))
    after = check(before)
    assert operators(after) == ["attention"]
    hidden = np.where(np.arange(5)[:, None] == 2, -np.inf, np.zeros(6)).reshape(1, 1, 5, 6)
    arguments = [drawn(i, *tensor_shape(x)) for i, x in enumerate(net.inputs[:3])]
    (found,) = run_llvm(after.module, *arguments, hidden.astype("float32"))
    (wanted,) = run_llvm(before.module, *arguments, hidden.astype("float32"))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert (np.asarray(found)[:, :, 2] == 0).all()


def test_the_zero_of_such_weights_may_be_a_constant_of_the_model():
    net = Network((1, 2, 5, 8), (1, 2, 8, 6), (1, 2, 6, 4), (1,))
    q, k, v, number = net.inputs
    weights = net.emit(relax.op.nn.softmax(net.emit(relax.op.matmul(q, k)), axis=-1))
    missing = net.emit(relax.op.isnan(weights))
    weights = net.emit(relax.op.where(missing, number, weights))
    made = net.program(net.emit(relax.op.matmul(weights, v)))

    def fused(value: float) -> list[str]:
        constant = np.full(1, value, np.float32)
        return operators(fuse_attention(Program(made.module, {number.name: constant}, made.origins)))

    assert fused(0) == ["attention"] and "attention" not in fused(1)


@pytest.mark.parametrize("scaled", [("query", "key"), ("key",), ("query",)], ids="_".join)
def test_keys_that_are_scaled_need_no_tensor_of_their_own(scaled):
    """Scaled queries alone do, unless the kernel that makes them scales them."""
    net = Network((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 4))
    q, k, v = net.inputs
    k = net.emit(relax.op.permute_dims(k, (0, 1, 3, 2)))
    if "query" in scaled:
        q = net.emit(relax.op.multiply(q, scale()))
    if "key" in scaled:
        k = net.emit(relax.op.multiply(k, scale()))
    weights = net.emit(relax.op.nn.softmax(net.emit(relax.op.matmul(q, k)), axis=-1))
    after = check(net.program(net.emit(relax.op.matmul(weights, v))))
    assert operators(after) == ([] if "key" in scaled else ["multiply"]) + ["attention"]


def test_capped_scores_join_it():
    net = Network((1, 2, 5, 8), (1, 2, 8, 6), (1, 2, 6, 4), (5, 6))
    q, k, v, mask = net.inputs
    scores = net.emit(relax.op.divide(net.emit(relax.op.matmul(q, k)), relax.const(2.0, "float32")))
    capped = net.emit(relax.op.multiply(net.emit(relax.op.tanh(scores)), relax.const(2.0, "float32")))
    weights = net.emit(relax.op.nn.softmax(net.emit(relax.op.add(capped, mask)), axis=-1))
    assert operators(check(net.program(net.emit(relax.op.matmul(weights, v))))) == ["attention"]


def test_rows_of_a_mask_that_come_again_are_there_once():
    """Of three heads of queries that share keys."""
    net = Network((1, 2, 12, 8), (1, 2, 8, 6), (1, 2, 6, 4), (1, 1, 4, 6))
    q, k, v, rows = net.inputs
    mask = net.emit(relax.op.concat((rows, rows, rows), axis=2), "again")
    weights = net.emit(
        relax.op.nn.softmax(net.emit(relax.op.add(net.emit(relax.op.matmul(q, k)), mask)), axis=-1)
    )
    after = check(net.program(net.emit(relax.op.matmul(weights, v))))
    assert operators(after) == ["attention"]
    [call] = (b.value for b in after.bindings)
    assert tensor_shape(call.args[1].fields[3]) == (1, 1, 4, 6)


@pytest.mark.parametrize("axis", [1, 3])
def test_other_masks_in_pieces_stay(axis):
    net = Network((1, 2, 12, 8), (1, 2, 8, 6), (1, 2, 6, 4), (1, 1, 12, 6))
    q, k, v, rows = net.inputs
    if axis == 3:
        rows = net.emit(relax.op.strided_slice(rows, axes=[3], begin=[0], end=[3]), "half")
    mask = net.emit(relax.op.concat((rows, rows), axis=axis), "again")
    weights = net.emit(
        relax.op.nn.softmax(net.emit(relax.op.add(net.emit(relax.op.matmul(q, k)), mask)), axis=-1)
    )
    after = check(net.program(net.emit(relax.op.matmul(weights, v))))
    assert operators(after)[-2:] == ["concat", "attention"]
