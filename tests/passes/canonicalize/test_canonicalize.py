from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.program.program import is_op, operator_name
from tests.support.programs import built_program, drawn, program_of, run_llvm


def assert_equal(got: tvm.IRModule, expected: tvm.IRModule) -> None:
    tvm.ir.assert_structural_equal(
        got["main"].without_attr("global_symbol"), expected["main"].without_attr("global_symbol")
    )


def arguments(program, x):
    names = [p.name for p in program.main.params]
    return [x, *(program.weights[n] for n in names[1:])]


@I.ir_module
class ConvBiasNorm:
    @R.function
    def main(
        x: R.Tensor((1, 3, 6, 6), "float32"),
        w: R.Tensor((4, 3, 3, 3), "float32"),
        b: R.Tensor((4,), "float32"),
        gamma: R.Tensor((4,), "float32"),
        beta: R.Tensor((4,), "float32"),
        mean: R.Tensor((4,), "float32"),
        variance: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            conv = R.nn.conv2d(x, w, padding=(1, 1))
            bias = R.reshape(b, (1, 4, 1, 1))
            biased = R.add(conv, bias)
            norm = R.nn.batch_norm(biased, gamma, beta, mean, variance, axis=1, epsilon=1e-3, training=False)
            y = norm[0]
            R.output(y)
        return (y,)


def weights_of_conv_bias_norm() -> dict[str, np.ndarray]:
    named = {"w": drawn(1, 4, 3, 3, 3), "b": drawn(2, 4), "gamma": drawn(3, 4), "beta": drawn(4, 4)}
    return named | {"mean": drawn(5, 4), "variance": np.abs(drawn(6, 4)) + 0.5}


def test_batch_norm_after_a_convolution_becomes_its_weights_and_one_bias():
    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((1, 3, 6, 6), "float32"),
            w: R.Tensor((4, 3, 3, 3), "float32"),
            bias: R.Tensor((1, 4, 1, 1), "float32"),
        ):
            conv = R.nn.conv2d(x, w, padding=(1, 1))
            biased = R.add(conv, bias)
            return (biased,)

    before = program_of(ConvBiasNorm, weights_of_conv_bias_norm())
    after = canonicalize(before)
    assert_equal(after.module, Expected)
    assert {o for origins in after.origins.values() for o in origins} >= {
        "node_conv",
        "node_biased",
        "node_norm",
    }

    x = drawn(0, 1, 3, 6, 6)
    want = run_llvm(before.module, *arguments(before, x))[0]
    got = run_llvm(after.module, *arguments(after, x))[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_batch_norm_by_itself_becomes_a_scale_and_a_shift():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 4, 6, 6), "float32"),
            gamma: R.Tensor((4,), "float32"),
            beta: R.Tensor((4,), "float32"),
            mean: R.Tensor((4,), "float32"),
            variance: R.Tensor((4,), "float32"),
        ):
            with R.dataflow():
                norm = R.nn.batch_norm(x, gamma, beta, mean, variance, axis=1, epsilon=1e-3, training=False)
                y = norm[0]
                R.output(y)
            return (y,)

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((1, 4, 6, 6), "float32"),
            scale: R.Tensor((1, 4, 1, 1), "float32"),
            shift: R.Tensor((1, 4, 1, 1), "float32"),
        ):
            scaled = R.multiply(x, scale)
            y = R.add(scaled, shift)
            return (y,)

    weights = {n: v for n, v in weights_of_conv_bias_norm().items() if n not in "wb"}
    before = program_of(Before, weights)
    after = canonicalize(before)
    assert_equal(after.module, Expected)
    x = drawn(0, 1, 4, 6, 6)
    want = run_llvm(before.module, *arguments(before, x))[0]
    np.testing.assert_allclose(run_llvm(after.module, *arguments(after, x))[0], want, rtol=1e-5, atol=1e-5)


def test_batch_norm_does_not_change_a_convolution_that_others_read():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 3, 6, 6), "float32"),
            w: R.Tensor((4, 3, 3, 3), "float32"),
            gamma: R.Tensor((4,), "float32"),
            beta: R.Tensor((4,), "float32"),
            mean: R.Tensor((4,), "float32"),
            variance: R.Tensor((4,), "float32"),
        ):
            with R.dataflow():
                conv = R.nn.conv2d(x, w, padding=(1, 1))
                norm = R.nn.batch_norm(conv, gamma, beta, mean, variance, axis=1, training=False)
                y = norm[0]
                z = R.add(y, conv)
                R.output(z)
            return (z,)

    weights = {n: v for n, v in weights_of_conv_bias_norm().items() if n != "b"}
    before = program_of(Before, weights)
    after = canonicalize(before)
    np.testing.assert_array_equal(after.weights["w"], weights["w"])
    x = drawn(0, 1, 3, 6, 6)
    want = run_llvm(before.module, *arguments(before, x))[0]
    np.testing.assert_allclose(run_llvm(after.module, *arguments(after, x))[0], want, rtol=1e-5, atol=1e-5)


@I.ir_module
class TiedEmbedding:
    @R.function
    def main(ids: R.Tensor((3,), "int64"), table: R.Tensor((1000, 300), "float32")):
        with R.dataflow():
            x = R.take(table, ids, axis=0)
            transposed = R.permute_dims(table, axes=[1, 0])
            logits = R.matmul(x, transposed)
            R.output(logits)
        return (logits,)


def test_the_transpose_of_a_large_shared_weight_is_not_copied():
    after = canonicalize(program_of(TiedEmbedding, {"table": drawn(0, 1000, 300)}))
    assert sum(w.nbytes for w in after.weights.values()) == 1000 * 300 * 4


def test_the_transpose_of_a_weight_that_nobody_else_reads_is_folded():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 5), "float32"), w: R.Tensor((7, 5), "float32")):
            with R.dataflow():
                transposed = R.permute_dims(w, axes=[1, 0])
                y = R.matmul(x, transposed)
                R.output(y)
            return (y,)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 5), "float32"), w: R.Tensor((5, 7), "float32")):
            y = R.matmul(x, w)
            return (y,)

    weight = drawn(0, 7, 5)
    after = canonicalize(program_of(Before, {"w": weight}))
    assert_equal(after.module, Expected)
    np.testing.assert_array_equal(next(iter(after.weights.values())), weight.T)


def test_a_weight_of_one_element_becomes_a_literal():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 5), "float32"), half: R.Tensor((1,), "float32")):
            with R.dataflow():
                y = R.multiply(x, half)
                R.output(y)
            return (y,)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 5), "float32")):
            y = R.multiply(x, R.const(0.5, "float32"))
            return (y,)

    after = canonicalize(program_of(Before, {"half": np.array([0.5], np.float32)}))
    assert_equal(after.module, Expected)


def test_what_no_output_needs_is_dropped():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 5), "float32"), w: R.Tensor((2, 5), "float32")):
            with R.dataflow():
                unused = R.add(x, w)  # noqa: F841
                y = R.nn.relu(x)
                R.output(y)
            return (y,)

    after = canonicalize(program_of(Before, {"w": drawn(0, 2, 5)}))
    assert [b.var.name for b in after.bindings] == ["y"]
    assert not after.weights


def test_an_output_may_be_an_input_or_named_twice():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 5), "float32")):
            with R.dataflow():
                y = R.nn.relu(x)
                R.output(y)
            return (y, x, y)

    after = canonicalize(program_of(Before))
    assert [o.name for o in after.outputs] == ["y", "x", "y"]


def test_neutral_numbers_go():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), n: R.Tensor((2, 3), "int64")):
            with R.dataflow():
                a = R.multiply(x, R.const(1.0, "float32"))
                b = R.subtract(a, R.const(0.0, "float32"))
                c = R.add(b, R.const(0.0, "float32"))
                d = R.divide(c, R.const(2.0, "float32"))
                m = R.add(n, R.const(0, "int64"))
                k = R.multiply(m, R.const(3, "int64"))
                R.output(d, k)
            return (d, k)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), n: R.Tensor((2, 3), "int64")):
            with R.dataflow():
                c = R.add(x, R.const(0.0, "float32"))  # of -0 it makes 0
                d = R.divide(c, R.const(2.0, "float32"))
                k = R.multiply(n, R.const(3, "int64"))
                R.output(d, k)
            return (d, k)

    before = program_of(Before)
    after = canonicalize(before)
    operators = [operator_name(b.value) for b in after.bindings]
    assert operators == [operator_name(b.value) for b in program_of(Expected).bindings]
    fed = np.array([[-0.0, 1, 2], [np.nan, -np.inf, 5]], np.float32), np.arange(6).reshape(2, 3)
    for wanted, found in zip(run_llvm(Expected, *fed), run_llvm(after.module, *fed), strict=True):
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def test_a_permutation_that_moves_nothing_is_a_view():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 5, 1, 4), "float32")):
            with R.dataflow():
                a = R.permute_dims(x, axes=[0, 2, 1, 3])
                b = R.permute_dims(x, axes=[0, 2, 3, 1])
                R.output(a, b)
            return (a, b)

    before = program_of(Before)
    after = canonicalize(before)
    assert [operator_name(b.value) for b in after.bindings] == ["reshape", "permute_dims"]
    x = drawn(0, 1, 5, 1, 4)
    for wanted, found in zip(run_llvm(Before, x), run_llvm(after.module, x), strict=True):
        np.testing.assert_array_equal(found, wanted)


def parts_of(e, x, w):
    first = e(relax.op.split(w, 2, axis=1))
    second = e(relax.op.split(w, [100], axis=0))
    y = e(relax.op.matmul(x, e(relax.TupleGetItem(first, 1))))
    return e(relax.op.add(y, e(relax.op.sum(e(relax.TupleGetItem(second, 0)), [0, 1]))))


@pytest.mark.parametrize(("rows", "are_folded"), [(200, True), (4000, False)])
def test_parts_of_a_weight_are_weights_unless_copies_of_it_would_be_large(rows, are_folded):
    before = built_program(parts_of, (3, rows), [drawn(1, rows, 200)])
    after = canonicalize(before)
    splits = [b for b in after.bindings if is_op(b.value, "split")]
    assert len(splits) == (0 if are_folded else 1)
    x = drawn(0, 3, rows)
    want, got = (run_llvm(p.module, *arguments(p, x))[0] for p in (before, after))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
