from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.fuse.attention import attention_operands, fuse_attention
from hybridc.passes.fuse.heads import join_heads
from hybridc.passes.program.program import Program, ProgramBuilder, operator_name, tensor_shape
from tests.support.programs import drawn, run_llvm


class Network:
    """Writes an attention over products of inputs, in front of a larger product."""

    def __init__(self, *shapes: tuple[int, ...], wide: int = 256) -> None:
        self.inputs = [relax.Var(f"x{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
        self.builder, self.wide = ProgramBuilder(self.inputs), wide

    def emit(self, expr: relax.Expr, name: str) -> relax.Var:
        return self.builder.emit(expr, (f"node_{name}",), name)

    def weight(self, name: str, *shape: int) -> relax.Var:
        return self.builder.weight(drawn(len(name) + shape[-1], *shape), name)

    def heads(self, x: relax.Var, name: str, heads: int, depth: int, *, biased: bool = True) -> relax.Var:
        *front, channels = tensor_shape(x)
        made = self.emit(
            relax.op.matmul(x, self.weight(f"w{name}", channels, heads * depth)), f"{name}_product"
        )
        if biased:
            made = self.emit(relax.op.add(made, self.weight(f"b{name}", heads * depth)), f"{name}_sum")
        return self.emit(relax.op.reshape(made, (*front, heads, depth)), f"{name}_heads")

    def program(self, q: relax.Var, k: relax.Var, v: relax.Var, *others: relax.Var) -> Program:
        turned = [
            self.emit(relax.op.permute_dims(x, axes), "turned")
            for x, axes in ((q, (0, 2, 1, 3)), (k, (0, 2, 3, 1)), (v, (0, 2, 1, 3)))
        ]
        scores = self.emit(relax.op.matmul(*turned[:2]), "scores")
        weights = self.emit(relax.op.nn.softmax(scores, axis=-1), "softmax")
        context = self.emit(relax.op.matmul(weights, turned[2]), "context")
        depth = tensor_shape(context)[-1]
        last = self.emit(relax.op.matmul(context, self.weight("wide", depth, self.wide)), "last")
        return self.builder.finish([last, *others])


def joined(before: Program) -> Program:
    """The program with heads joined and attention fused, after a check that it computes the same."""
    after = join_heads(before, attention_operands(before, lambda _: True), {})
    after = fuse_attention(after)
    inputs = [drawn(i, *tensor_shape(x)) for i, x in enumerate(before.inputs)]
    results = [
        run_llvm(
            program.module, *inputs, *(program.weights[v.name] for v in program.main.params[len(inputs) :])
        )
        for program in (after, before)
    ]
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    return after


def operators(program: Program) -> list[str]:
    return [operator_name(b.value) for b in program.bindings]


@pytest.mark.parametrize("biased", [True, False])
def test_queries_keys_and_values_of_a_tensor_are_one_product(biased):
    net = Network((2, 5, 16))
    q, k, v = (net.heads(net.inputs[0], name, 3, 8, biased=biased) for name in "qkv")
    after = joined(net.program(q, k, v))
    assert operators(after) == ["matmul", *["add"] * biased, *["reshape"] * 3, "attention", "matmul"]
    assert tensor_shape(after.bindings[0].var) == (2, 5, 72)
    name = after.bindings[0].var.name
    assert after.origins[name] == ("node_q_product", "node_k_product", "node_v_product")
    np.testing.assert_array_equal(after.weights["wq+wk+wv"][:, 24:48], drawn(2 + 24, 16, 24))


def test_only_what_reads_one_tensor_is_joined():
    net = Network((1, 4, 16), (1, 7, 12))
    q = net.heads(net.inputs[0], "q", 2, 8)
    k, v = (net.heads(net.inputs[1], name, 2, 8) for name in "kv")
    after = joined(net.program(q, k, v))
    assert operators(after).count("matmul") == 3
    assert {"wq", "wk+wv", "bk+bv", "wide"} <= after.weights.keys()


def test_fewer_heads_of_keys_than_of_queries():
    net = Network((1, 5, 16))
    q, k, v = (net.heads(net.inputs[0], name, heads, 8) for name, heads in (("q", 4), ("k", 1), ("v", 1)))
    k, v = (net.emit(relax.op.broadcast_to(x, (1, 5, 4, 8)), "repeated") for x in (k, v))
    after = joined(net.program(q, k, v))
    assert operators(after) == ["matmul", "add", *["reshape"] * 3, "attention", "matmul"]


def test_values_of_another_depth_stay():
    net = Network((1, 5, 16))
    q, k, v = (net.heads(net.inputs[0], n, 2, depth) for n, depth in (("q", 8), ("k", 8), ("v", 4)))
    assert {"wq+wk", "wv"} <= joined(net.program(q, k, v)).weights.keys()


def test_what_somebody_else_reads_stays():
    net = Network((1, 5, 16))
    q, k, v = (net.heads(net.inputs[0], name, 2, 8) for name in "qkv")
    assert {"wq+wk", "wv"} <= joined(net.program(q, k, v, v)).weights.keys()


def test_no_product_becomes_larger_than_the_largest():
    net = Network((1, 5, 16), wide=32)
    q, k, v = (net.heads(net.inputs[0], name, 2, 8) for name in "qkv")
    before = net.program(q, k, v)
    assert join_heads(before, attention_operands(before, lambda _: True), {}) is before


def test_a_weight_that_was_joined_before_is_not_copied():
    net = Network((1, 5, 16))
    q, k, v = (net.heads(net.inputs[0], name, 2, 8) for name in "qkv")
    before = net.program(q, k, v)
    operands = attention_operands(before, lambda _: True)
    first = join_heads(before, operands, {})
    again = join_heads(before, operands, first.weights)
    assert again.weights["wq+wk+wv"] is first.weights["wq+wk+wv"]
