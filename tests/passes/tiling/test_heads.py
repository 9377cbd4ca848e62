"""Attention cut by heads: caches in two parts, and what is computed with each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, te

from hybridc.appended_rows import appended_rows
from hybridc.passes.canonicalize.rotary import rotary
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    is_op,
    operator_name,
    tensor_dtype,
    tensor_shape,
    variables,
)
from hybridc.passes.tiling import side_by_side as module
from hybridc.passes.tiling.side_by_side import SideBySide, large_products, side_by_side
from hybridc.schedules.shapes import index_shape
from tests.support.programs import drawn, run_llvm
from tests.support.random_examples import random_examples


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_BYTES", 1)
    monkeypatch.setattr(module, "_STEP", 2)


@dataclass(frozen=True)
class Layer:
    """Attention of one new token, behind which stands one more product."""

    batch: int = 1
    heads: int = 4
    """Of keys and values."""
    group: int = 1
    """Heads of queries for each."""
    depth: int = 4
    places: int = 6
    width: int = 8
    is_joined: bool = True
    """Whether queries, keys and values come from one product."""
    has_bias: bool = False
    has_residual: bool = False
    """Whether an activation is added to the product before it is taken apart."""
    reads_all: bool = False
    """Whether something reads all heads of the keys."""

    def caches(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.places, self.depth

    def program(self) -> Program:
        types = {
            "x": relax.TensorType((self.batch, 1, self.width), "float32"),
            "keys": relax.TensorType(self.caches(), "float32"),
            "values": relax.TensorType(self.caches(), "float32"),
            "before": relax.TensorType((self.batch, 1, 1, 1), "int32"),
        }
        x, keys, values, before = (relax.Var(name, ty) for name, ty in types.items())
        net = _Writer(ProgramBuilder([x, keys, values, before]))
        queries = self.heads * self.group
        columns = [n * self.depth for n in (queries, self.heads, self.heads)]
        residual = net.product(x, sum(columns)) if self.has_residual else None
        q, k, v = net.projections(
            x, columns, is_joined=self.is_joined, has_bias=self.has_bias, residual=residual
        )
        q = net.turned(net.reshape(q, self.batch, queries, 1, 2, self.depth // 2))
        q = net.reshape(q, self.batch, self.heads, self.group, self.depth)
        k = net.turned(net.reshape(k, self.batch, self.heads, 1, 2, self.depth // 2))
        k = net.reshape(k, self.batch, self.heads, 1, self.depth)
        v = net.reshape(v, self.batch, self.heads, 1, self.depth)
        new_keys, new_values = net.appended(keys, k, before), net.appended(values, v, before)
        scores = net.emit(relax.op.matmul(q, net.emit(relax.op.permute_dims(new_keys, [0, 1, 3, 2]))))
        weights = net.emit(relax.op.nn.softmax(scores, axis=3))
        context = net.reshape(
            net.emit(relax.op.matmul(weights, new_values)), self.batch, 1, queries * self.depth
        )
        out = net.product(context, self.width)
        out = net.emit(relax.op.add(x, out))
        others = [net.emit(relax.op.sum(new_keys, axis=[1]))] if self.reads_all else []
        return net.finish([out, new_keys, *others, new_values])

    def feeds(self) -> list[np.ndarray]:
        before = np.full((self.batch, 1, 1, 1), self.places - 2, np.int32)
        x = drawn(1, self.batch, 1, self.width)
        return [x, drawn(2, *self.caches()), drawn(3, *self.caches()), before]


@dataclass
class _Writer:
    builder: ProgramBuilder

    def __post_init__(self) -> None:
        self.functions: dict[tvm.ir.GlobalVar, object] = {}

    def emit(self, expr: relax.Expr, name: str = "v") -> relax.Var:
        return self.builder.emit(expr, (f"node_{name}",), name)

    def reshape(self, value: relax.Var, *shape: int) -> relax.Var:
        return self.emit(relax.op.reshape(value, shape))

    def product(self, x: relax.Var, columns: int) -> relax.Var:
        weight = drawn(len(self.builder.weights), tensor_shape(x)[-1], columns) / 4
        return self.emit(relax.op.matmul(x, self.builder.weight(weight, "w")), "product")

    def projections(
        self,
        x: relax.Var,
        columns: Sequence[int],
        *,
        is_joined: bool,
        has_bias: bool,
        residual: relax.Var | None,
    ) -> list[relax.Var]:
        if not is_joined:
            return [self.product(x, each) for each in columns]
        value = self.product(x, sum(columns))
        if has_bias:
            value = self.emit(relax.op.add(value, self.builder.weight(drawn(7, sum(columns)), "bias")))
        if residual is not None:
            value = self.emit(relax.op.add(value, residual))
        parts = self.emit(relax.op.split(value, list(np.cumsum(columns)[:-1]), axis=2))
        return [self.emit(relax.TupleGetItem(parts, i)) for i in range(3)]

    def turned(self, value: relax.Var) -> relax.Var:
        table = (*[1] * (len(tensor_shape(value)) - 1), tensor_shape(value)[-1])
        tables = [self.builder.weight(drawn(seed, *table), "angles") for seed in (8, 9)]
        return self.call(rotary(tensor_shape(value), table, table), "rotary", value, *tables)

    def appended(self, past: relax.Var, new: relax.Var, before: relax.Var) -> relax.Var:
        operands = [(index_shape(tensor_shape(v)), tensor_dtype(v)) for v in (past, new, before)]
        given = [te.placeholder(*each) for each in operands]
        function = te.create_prim_func([*given, appended_rows(*given)], index_dtype_override="int64")
        return self.call(function.with_attr("op_pattern", 8), "appended_rows", past, new, before)

    def call(self, function: tvm.tirx.PrimFunc, name: str, *operands: relax.Var) -> relax.Var:
        variable = tvm.ir.GlobalVar(f"{name}_{len(self.functions)}")
        function = function.with_attr("global_symbol", variable.name_hint)
        relax.expr._update_type(variable, function.ty)
        self.functions[variable] = function
        return self.emit(relax.call_tir(variable, list(operands), operands[0].ty), name)

    def finish(self, outputs: list[relax.Expr]) -> Program:
        return self.builder.finish(outputs, self.functions)


def assert_same(layer: Layer, before: Program, after: SideBySide) -> None:
    """With each cache in two parts, fed and returned."""
    feeds = layer.feeds()
    wanted = run_llvm(before.module, *feeds, *before.weights.values())
    names = [v.name for v in before.inputs]
    new = dict(zip(names, feeds, strict=True))
    shapes = {v.name: tensor_shape(v) for v in after.program.inputs}
    for name, (one, other) in after.inputs.items():
        cut = shapes[one][1]
        new |= {one: new[name][:, :cut], other: new[name][:, cut:]}
    parts = [np.ascontiguousarray(new[v.name]) for v in after.program.inputs]
    got = run_llvm(after.program.module, *parts, *after.program.weights.values())
    for first, second in after.outputs.items():
        got[first] = np.concatenate([got[first], got[second]], axis=1)
    for result, each in zip(got, wanted, strict=False):
        np.testing.assert_allclose(result, each, rtol=0, atol=1e-5 * max(1.0, np.abs(each).max()))


def in_two(layer: Layer, heads: float, share: float = 0.25) -> tuple[Program, SideBySide]:
    before = layer.program()
    made = side_by_side(before, large_products(before), share, heads)
    assert made is not None
    assert_same(layer, before, made)
    return before, made


@random_examples(30)
@given(
    layer=st.builds(
        Layer,
        batch=st.integers(1, 2),
        heads=st.integers(1, 5),
        group=st.integers(1, 3),
        depth=st.sampled_from([2, 4]),
        is_joined=st.booleans(),
        has_bias=st.booleans(),
        has_residual=st.booleans(),
        reads_all=st.booleans(),
    ),
    heads=st.floats(0.0, 1.0),
    share=st.floats(0.1, 0.9),
)
def test_results_stay_the_same(layer: Layer, heads: float, share: float) -> None:
    before = layer.program()
    made = side_by_side(before, large_products(before), share, heads)
    if made is not None:
        assert_same(layer, before, made)
    cut = layer.heads - round(heads * layer.heads)
    if made is not None and 0 < cut < layer.heads and not layer.reads_all:
        assert list(made.inputs) == ["keys", "values"] and list(made.outputs) == [1, 2]
        parts = {v.name: tensor_shape(v)[1] for v in made.program.inputs if ".band" in v.name}
        assert parts == {
            "keys.band0": cut, "values.band0": cut,
            "keys.band1": layer.heads - cut, "values.band1": layer.heads - cut,
        }  # fmt: skip


@pytest.mark.parametrize("is_joined", [True, False])
def test_nothing_is_exchanged_between_the_products_and_attention(is_joined: bool) -> None:
    """Queries, keys and values of a part come from products of their own, which read the same rows."""
    _, made = in_two(Layer(heads=4, group=2, is_joined=is_joined), heads=0.25)
    values = {b.var: b.value for b in made.program.bindings}
    names = [operator_name(value) for value in values.values()]
    assert "split" not in names and "strided_slice" not in names[: names.index("concat")]
    for past in made.program.inputs[1:3] + made.program.inputs[4:]:
        [append] = [v for v in values.values() if past in variables(v)]
        reached, queue = set(), list(variables(append))
        while queue:
            var = queue.pop()
            reached.add(var)
            value = values.get(var)
            if value is not None and not is_op(value, "matmul"):
                queue += variables(value)
        assert not any(has_fact(values.get(var), Fact.MOVEMENT) for var in reached if var in values)


def test_a_product_to_which_an_activation_is_added_is_not_taken_apart() -> None:
    _, made = in_two(Layer(has_residual=True), heads=0.5)
    assert any(is_op(b.value, "split") for b in made.program.bindings)


def test_caches_stay_whole_where_something_reads_all_heads() -> None:
    _, made = in_two(Layer(reads_all=True), heads=0.5)
    assert not made.inputs and not made.outputs


@pytest.mark.parametrize("heads", [0.0, 0.05, 1.0])
def test_caches_stay_whole_where_a_part_would_have_no_heads(heads: float) -> None:
    _, made = in_two(Layer(), heads)
    assert not made.inputs
