from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from hybridc.errors import ModelError
from hybridc.passes.fuse.fuse import MAX_GROUP, MAX_READS, fuse, refused_operators
from hybridc.passes.program.program import Program, ProgramBuilder, is_op
from tests.support.programs import drawn, program_of, run_llvm


def calls(program: Program) -> list[str]:
    """The functions called by `main`, in order."""
    return [b.value.args[0].name_hint for b in program.bindings if is_op(b.value, "call_tir")]


def functions(program: Program) -> set[str]:
    return {g.name_hint for g, f in program.module.functions.items() if isinstance(f, tirx.PrimFunc)}


@I.ir_module
class Residual:
    @R.function
    def main(
        x: R.Tensor((1, 4, 6, 6), "float32"),
        w: R.Tensor((4, 4, 3, 3), "float32"),
        b: R.Tensor((1, 4, 1, 1), "float32"),
        w2: R.Tensor((4, 4, 3, 3), "float32"),
    ):
        with R.dataflow():
            c = R.nn.conv2d(x, w, padding=(1, 1))
            d = R.add(c, b)
            e = R.nn.relu(d)
            f = R.nn.conv2d(e, w2, padding=(1, 1))
            g = R.add(f, b)
            h = R.add(g, x)
            y = R.nn.relu(h)
            R.output(y)
        return (y,)


RESIDUAL_WEIGHTS = {"w": drawn(1, 4, 4, 3, 3), "b": drawn(2, 1, 4, 1, 1), "w2": drawn(3, 4, 4, 3, 3)}


def test_bias_residual_and_activation_join_their_convolution():
    before = program_of(Residual, RESIDUAL_WEIGHTS)
    after = fuse(before)
    assert calls(after) == ["conv2d_add_relu", "conv2d_add_relu_1"]
    assert list(after.origins.values()) == [
        ("node_c", "node_d", "node_e"),
        ("node_f", "node_g", "node_h", "node_y"),
    ]
    x = drawn(0, 1, 4, 6, 6)
    want = run_llvm(before.module, x, *RESIDUAL_WEIGHTS.values())[0]
    np.testing.assert_allclose(
        run_llvm(after.module, x, *RESIDUAL_WEIGHTS.values())[0], want, rtol=1e-5, atol=1e-5
    )


def test_kernels_of_the_same_shape_share_one_function():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32"), v: R.Tensor((8, 8), "float32")
        ):
            with R.dataflow():
                a = R.matmul(x, w)
                b = R.nn.relu(a)
                c = R.matmul(b, v)
                d = R.nn.relu(c)
                e = R.matmul(d, w)
                y = R.nn.relu(e)
                R.output(y)
            return (y,)

    after = fuse(program_of(Before, {"w": drawn(0, 8, 8), "v": drawn(1, 8, 8)}))
    assert calls(after) == ["matmul_relu"] * 3
    assert functions(after) == {"matmul_relu"}


def test_a_weight_and_an_activation_in_the_same_place_make_two_functions():
    """A schedule may pack the weight at compile time, never the activation."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")):
            with R.dataflow():
                a = R.matmul(x, w)
                y = R.matmul(x, a)
                R.output(y)
            return (y,)

    assert functions(fuse(program_of(Before, {"w": drawn(0, 8, 8)}))) == {"matmul", "matmul_1"}


def test_a_diamond_of_elementwise_operators_joins_the_matmul_it_starts_from():
    @I.ir_module
    class Gelu:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32")):
            with R.dataflow():
                h = R.matmul(x, w)
                a = R.divide(h, R.const(1.4142135, "float32"))
                b = R.erf(a)
                c = R.add(b, R.const(1.0, "float32"))
                d = R.multiply(h, c)
                y = R.multiply(d, R.const(0.5, "float32"))
                R.output(y)
            return (y,)

    before = program_of(Gelu, {"w": drawn(0, 8, 8)})
    after = fuse(before)
    assert calls(after) == ["matmul_divide_erf_add_multiply"]
    x = drawn(1, 4, 8)
    want = run_llvm(before.module, x, drawn(0, 8, 8))[0]
    np.testing.assert_allclose(run_llvm(after.module, x, drawn(0, 8, 8))[0], want, rtol=1e-5, atol=1e-6)


def test_a_result_that_others_read_or_the_user_asked_for_is_not_fused_away():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")):
            with R.dataflow():
                a = R.matmul(x, w)
                b = R.nn.relu(a)
                c = R.matmul(b, w)
                d = R.exp(b)
                e = R.add(c, d)
                R.output(a, e)
            return (a, e)

    after = fuse(program_of(Before, {"w": drawn(0, 8, 8)}))
    assert calls(after)[:2] == ["matmul", "relu"]
    assert calls(after)[2:] == ["matmul_exp_add"] or calls(after)[2:] == ["exp", "matmul_add"]


@pytest.mark.parametrize("operators", [32, 33, 100])
def test_a_long_chain_is_split_into_kernels_of_at_most_32_operators(operators):
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    builder = ProgramBuilder([x])
    y = x
    for i in range(operators):
        y = builder.emit(relax.op.abs(y), [f"node_{i}"], f"t{i}")
    after = fuse(builder.finish([y]))
    sizes = [len(origins) for origins in after.origins.values()]
    assert sum(sizes) == operators and max(sizes) <= MAX_GROUP
    assert len(sizes) == -(-operators // MAX_GROUP)


def test_a_join_of_two_long_chains_is_at_most_32_operators():
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    builder = ProgramBuilder([x])
    ends = []
    for chain in range(2):
        y = x
        for i in range(20):
            y = builder.emit(relax.op.abs(y), [f"node_{chain}_{i}"], f"t{chain}_{i}")
        ends.append(y)
    joined = builder.emit(relax.op.add(*ends), ["node_join"], "join")
    after = fuse(builder.finish([joined]))
    assert sorted(len(origins) for origins in after.origins.values()) == [20, 21]


def chain_of(count: int, function: Callable[[relax.Expr], relax.Expr]) -> Program:
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    builder = ProgramBuilder([x])
    value = x
    for i in range(count):
        value = builder.emit(function(value), [f"node_{i}"], "v")
    return builder.finish([value])


@pytest.mark.parametrize("function", [relax.op.tanh, relax.op.sigmoid, relax.op.tan])
def test_elementary_functions_of_each_other_are_one_kernel(function):
    after = fuse(chain_of(8, function))
    assert len(after.origins) == 1


@pytest.mark.parametrize(
    "double", [lambda v: relax.op.multiply(v, v), lambda v: relax.op.add(v, v)], ids=["square", "sum"]
)
def test_values_that_are_read_twice_do_not_double_the_expression_of_a_kernel_for_each(double):
    after = fuse(chain_of(40, double))
    # 2**7 operands stand in the expression of seven of them
    assert MAX_READS == 2**7
    assert [len(origins) for origins in after.origins.values()] == [7, 7, 7, 7, 7, 5]


def test_two_anchors_never_share_a_kernel():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32"), v: R.Tensor((8, 8), "float32")
        ):
            with R.dataflow():
                a = R.matmul(x, w)
                b = R.matmul(x, v)
                y = R.add(a, b)
                R.output(y)
            return (y,)

    after = fuse(program_of(Before, {"w": drawn(0, 8, 8), "v": drawn(1, 8, 8)}))
    assert sorted(calls(after)) == ["matmul", "matmul_add"]


def test_a_reshape_stays_a_view():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3, 4), "float32")):
            with R.dataflow():
                a = R.exp(x)
                b = R.reshape(a, (6, 4))
                y = R.exp(b)
                R.output(y)
            return (y,)

    after = fuse(program_of(Before))
    assert [is_op(b.value, "reshape") for b in after.bindings] == [False, True, False]


def test_an_operator_with_several_results_keeps_them_apart():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 6), "float32")):
            with R.dataflow():
                parts = R.split(x, 2, axis=1)
                a = parts[0]
                b = parts[1]
                y = R.multiply(a, b)
                R.output(y)
            return (y,)

    before = program_of(Before)
    x = drawn(0, 2, 6)
    np.testing.assert_allclose(run_llvm(fuse(before).module, x)[0], x[:, :3] * x[:, 3:], rtol=1e-6)


def test_the_transpose_of_a_weight_that_is_an_input_is_done_by_the_matmul():
    @I.ir_module
    class Dense:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((6, 8), "float32")):
            with R.dataflow():
                transposed = R.permute_dims(w, axes=[1, 0])
                y = R.matmul(x, transposed)
                R.output(y)
            return (y,)

    fused = fuse(program_of(Dense))
    assert calls(fused) == ["permute_dims_matmul"]
    x, w = drawn(0, 4, 8), drawn(1, 6, 8)
    [result] = run_llvm(fused.module, x, w)
    np.testing.assert_allclose(result, x @ w.T, rtol=1e-5, atol=1e-6)


def test_the_transpose_of_a_tied_weight_is_done_by_the_matmul():
    @I.ir_module
    class Before:
        @R.function
        def main(ids: R.Tensor((3,), "int64"), table: R.Tensor((10, 6), "float32")):
            with R.dataflow():
                x = R.take(table, ids, axis=0)
                transposed = R.permute_dims(table, axes=[1, 0])
                y = R.matmul(x, transposed)
                R.output(y)
            return (y,)

    table = drawn(0, 10, 6)
    after = fuse(program_of(Before, {"table": table}))
    assert calls(after) == ["take", "permute_dims_matmul"]
    ids = np.array([1, 5, 9])
    np.testing.assert_allclose(
        run_llvm(after.module, ids, table)[0], table[ids] @ table.T, rtol=1e-5, atol=1e-5
    )


def test_time_grows_with_distinct_kernels_not_with_layers():
    """1,500 equal layers make one function, legalised once."""
    x = relax.Var(
        "x",
        R.Tensor((4, 4), "float32").ty
        if hasattr(R.Tensor((4, 4)), "ty")
        else relax.TensorType((4, 4), "float32"),
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        value = x
        for _ in range(1500):
            value = builder.emit(relax.op.nn.softmax(value))
        builder.emit_func_output(relax.Tuple([value]))
    after = fuse(program_of(builder.get()))
    assert functions(after) == {"softmax"}
    assert len(calls(after)) == 1500


def test_an_operator_without_tensor_ir_is_refused_by_the_name_of_its_node():
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        value = builder.emit(relax.op.call_pure_packed("nowhere", x, ty_args=[x.ty]), "strange")
        value = builder.emit(relax.op.nn.relu(value))
        value = builder.emit(relax.op.call_pure_packed("elsewhere", value, ty_args=[x.ty]), "stranger")
        builder.emit_func_output(relax.Tuple([value]))
    with pytest.raises(ModelError, match="HC150"):
        fuse(program_of(builder.get()))
    assert [error.code for error in refused_operators(program_of(builder.get()))] == ["HC150", "HC150"]


def test_the_result_is_well_formed_relax():
    after = fuse(program_of(Residual, RESIDUAL_WEIGHTS))
    assert relax.analysis.check_well_formed(after.module)
