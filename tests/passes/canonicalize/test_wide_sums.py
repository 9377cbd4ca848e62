"""Sums of float16 in float32."""

from __future__ import annotations

import numpy as np
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

from hybridc.passes.canonicalize.wide_sums import sum_in_float32
from tests.support.programs import drawn, program_of


def test_products_are_wide_and_operands_stay_narrow():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float16"), w: R.Tensor((8, 2), "float16")):
            y = R.matmul(x, w)
            z = R.nn.relu(y)
            return (z,)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((4, 8), "float16"), w: R.Tensor((8, 2), "float16")):
            y = R.matmul(x, w, out_dtype="float32")
            y_1 = R.astype(y, "float16")
            z = R.nn.relu(y_1)
            return (z,)

    assert_structural_equal(sum_in_float32(program_of(Before)).main, program_of(Expected).main)


def test_a_bias_is_added_before_the_sum_is_rounded():
    """A weight, in either order; what else reads the product reads what is rounded."""

    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((4, 8), "float16"), w: R.Tensor((8, 2), "float16"), b: R.Tensor((2,), "float16")
        ):
            y = R.matmul(x, w)
            z = R.add(b, y)
            q = R.matmul(x, w)
            r = R.add(q, b)
            s = R.multiply(q, r)
            return (z, s)

    bias = drawn(0, 2).astype("float16")
    after = sum_in_float32(program_of(Before, {"b": bias}))
    calls = [binding.value for binding in after.bindings]
    names = [call.op.name.removeprefix("relax.") for call in calls]
    assert names == ["matmul", "add", "astype", "matmul", "astype", "add", "multiply"]
    assert [str(calls[i].args[0].ty.dtype) for i in (1, 5)] == ["float32", "float16"]
    wide = after.weights[calls[1].args[1].name]
    assert wide.dtype == np.float32 and (wide == bias).all()


def test_means_are_of_wide_operands():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float16")):
            y = R.mean(x, axis=[1])
            return (y,)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((4, 8), "float16")):
            y = R.astype(x, "float32")
            y_1 = R.mean(y, axis=[1])
            y_2 = R.astype(y_1, "float16")
            return (y_2,)

    assert_structural_equal(sum_in_float32(program_of(Before)).main, program_of(Expected).main)


def test_a_program_of_floats_is_left_alone():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 2), "float32")):
            y = R.matmul(x, w)
            return (y,)

    program = program_of(Before)
    assert sum_in_float32(program) is program
