"""Products that transpose what they read or write, and the shapes of attention."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from hybridc.schedules.cpu.matmul.matmul import matmul
from hybridc.schedules.rule import Request
from hybridc.targets import Target

op = relax.op


def composed(build, shapes):
    """One PrimFunc of everything that `build(emit, *inputs)` emits."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"p{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    with builder.function("group", inputs, attrs={"Primitive": 1}):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, *inputs))
        builder.emit_func_output(result)
    legal = relax.transform.LegalizeOps()(builder.get())
    group = legal.get_global_var("group")
    parameters = [relax.Var(p.name, p.ty) for p in legal["group"].params]
    call = relax.BlockBuilder().normalize(relax.Call(group, parameters))
    returned = relax.Var("result", call.ty)
    block = relax.BindingBlock([relax.VarBinding(returned, call)])
    main = relax.Function(parameters, relax.SeqExpr([block], returned), returned.ty)
    functions = dict(legal.functions.items())
    functions[group] = legal["group"].without_attr("global_symbol")
    functions[tvm.ir.GlobalVar("main")] = main.with_attr("global_symbol", "main")
    fused = relax.transform.FuseTIR()(tvm.IRModule(functions))
    (function,) = [f for f in fused.functions.values() if isinstance(f, tirx.PrimFunc)]
    return function


def drawn(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("f4")


@pytest.mark.parametrize("tokens", [37, 128])
def test_scores_read_queries_and_keys_where_they_are(harness, assert_close, tokens):
    def build(emit, q, k):
        heads = emit(op.permute_dims(q, [0, 2, 1, 3])), emit(op.permute_dims(k, [0, 2, 3, 1]))
        return emit(op.divide(emit(op.matmul(*heads)), relax.const(8.0)))

    q, k = drawn(1, tokens, 3, 64), drawn(1, tokens, 3, 65)[..., :64].copy()
    function = composed(build, [q.shape, k.shape])
    scheduled = harness.schedule(function, (), matmul)
    assert not scheduled.workspace_bytes
    (result,) = harness.run(function, scheduled, [q, k])
    assert_close(result, np.einsum("bmhd,bnhd->bhmn", q.astype("f8"), k.astype("f8")) / 8)


@pytest.mark.parametrize("tokens", [37, 64])
def test_the_context_is_written_transposed(harness, assert_close, tokens):
    def build(emit, scores, v):
        context = emit(op.matmul(scores, emit(op.permute_dims(v, [0, 2, 1, 3]))))
        return emit(op.permute_dims(emit(op.nn.relu(context)), [0, 2, 1, 3]))

    scores, v = drawn(2, 3, tokens, tokens), drawn(2, tokens, 3, 24)
    function = composed(build, [scores.shape, v.shape])
    (result,) = harness.run(function, harness.schedule(function, (), matmul), [scores, v])
    assert_close(result, np.maximum(np.einsum("bhmn,bnhd->bmhd", scores.astype("f8"), v.astype("f8")), 0))


@pytest.mark.parametrize("shapes", [((90, 40), (90, 50)), ((40, 90), (90, 50))], ids=["left", "both"])
def test_a_transposed_left_factor_is_read_in_place(harness, assert_close, shapes):
    def build(emit, a, b):
        return emit(op.matmul(emit(op.permute_dims(a)) if shapes[0][0] == 90 else a, b))

    a, b = (drawn(*shape) for shape in shapes)
    function = composed(build, shapes)
    (result,) = harness.run(function, harness.schedule(function, (), matmul), [a, b])
    left = a.T if shapes[0][0] == 90 else a
    assert_close(result, left.astype("f8") @ b.astype("f8"))


@pytest.mark.parametrize(("rows", "depth", "columns"), [(9, 22, 37), (70, 3, 64), (33, 64, 5)], ids=str)
def test_a_right_factor_stored_by_columns_is_transposed_on_the_way(
    harness, assert_close, rows, depth, columns
):
    a, b = drawn(rows, depth), drawn(columns, depth)
    function = composed(lambda emit, x, y: emit(op.matmul(x, emit(op.permute_dims(y)))), [a.shape, b.shape])
    scheduled = harness.schedule(function, (), matmul)
    assert not scheduled.workspace_bytes
    (result,) = harness.run(function, scheduled, [a, b])
    assert_close(result, a.astype("f8") @ b.T.astype("f8"))


def test_many_rows_share_a_copied_panel(harness, assert_close):
    """A product of few panels is cut into tasks by rows, and the last one has fewer."""
    a, b = drawn(1000, 24), drawn(24, 40)
    function = harness.function(lambda emit, x, y: emit(op.matmul(x, y)), [a.shape, b.shape])
    (result,) = harness.run(function, harness.schedule(function, (), matmul), [a, b])
    assert_close(result, a.astype("f8") @ b.astype("f8"))


def test_every_tile_on_offer_gives_the_product(harness, assert_close):
    a, b = drawn(53, 20), drawn(20, 100)
    function = harness.function(lambda emit, x, y: emit(op.matmul(x, y)), [a.shape, b.shape])
    labels = harness.schedule(function, [1], matmul).choices
    assert len(labels) > 1
    for label in labels:
        made = matmul(Request(function, frozenset([1]), Target((), harness.isa), label))
        assert made is not None
        (result,) = harness.run(function, made, [a, b])
        assert_close(result, a.astype("f8") @ b.astype("f8"))
