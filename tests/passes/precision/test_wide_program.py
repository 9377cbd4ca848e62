"""Networks of 16-bit floats as networks of float32."""

from __future__ import annotations

import numpy as np
from tvm.script import ir as I
from tvm.script import relax as R

from hybridc.passes.precision.wide_program import in_float32
from hybridc.passes.program.program import Program, tensor_dtype
from tests.support.programs import drawn, program_of


def types(program: Program) -> list[tuple[str, str]]:
    """Of each binding the operator and the type of the result."""
    return [(b.value.op.name.removeprefix("relax."), tensor_dtype(b.var)) for b in program.bindings]


def test_arithmetic_is_float32_and_what_is_stored_is_noted():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((4, 8), "float16"), n: R.Tensor((2,), "float32"), w: R.Tensor((8, 2), "float16")
        ):
            y = R.matmul(x, w)
            z = R.nn.relu(y)
            u = R.astype(z, "float32")
            v = R.add(u, n)
            return (z, v)

    weight = drawn(0, 8, 2).astype("float16")
    program, narrow = in_float32(program_of(Before, {"w": weight}))
    assert types(program) == [("matmul", "float32"), ("nn.relu", "float32"), ("add", "float32")]
    assert [tensor_dtype(v) for v in program.main.params] == ["float32"] * 3
    assert program.weights["w"].dtype == np.float32 and (program.weights["w"] == weight).all()
    assert narrow.inputs == {"x": "float16"} and narrow.outputs == {0: "float16"}
    assert narrow.nodes == {"node_y": "float16", "node_z": "float16"}


def test_what_the_model_rounds_is_rounded():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float32"), i: R.Tensor((4,), "int32")):
            y = R.astype(x, "float16")
            u = R.astype(y, "float32")
            z = R.nn.relu(u)
            j = R.astype(i, "bfloat16")
            k = R.astype(j, "int32")
            return (z, k)

    program, narrow = in_float32(program_of(Before))
    casts = [t for name, t in types(program) if name == "astype"]
    assert casts == ["float16", "float32", "bfloat16", "float32", "int32"]
    assert not narrow.inputs and not narrow.outputs


def test_outputs_of_two_types_are_two_tensors():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float16")):
            y = R.astype(x, "float32")
            z = R.reshape(y, (2, 2))
            return (x, z)

    program, narrow = in_float32(program_of(Before))
    assert types(program) == [("astype", "float32"), ("reshape", "float32")]
    assert narrow.inputs == {"x": "float16"} and narrow.outputs == {0: "float16"}


def test_constants_and_sums_that_name_their_type_are_float32():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "bfloat16"), w: R.Tensor((8, 2), "bfloat16")):
            y = R.matmul(x, w, out_dtype="bfloat16")
            z = R.multiply(y, R.const(0.5, "bfloat16"))
            return (z,)

    program, narrow = in_float32(program_of(Before))
    assert types(program) == [("matmul", "float32"), ("multiply", "float32")]
    assert tensor_dtype(program.bindings[1].value.args[1]) == "float32"
    assert narrow.outputs == {0: "bfloat16"}


def test_functions_are_called_with_the_types_that_they_have():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float16")):
            y = R.memory.view(x, R.shape([2, 2]), R.dtype("float16"), R.prim_value(0))
            z = R.nn.relu(y)
            return (z,)

    program, _ = in_float32(program_of(Before))
    assert types(program) == [
        ("astype", "float16"),
        ("memory.view", "float16"),
        ("astype", "float32"),
        ("nn.relu", "float32"),
    ]


def test_a_program_of_floats_is_left_alone():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 2), "float32")):
            y = R.matmul(x, w)
            return (y,)

    program = program_of(Before)
    found, narrow = in_float32(program)
    assert found is program and not narrow


def test_a_cast_that_nothing_else_sees_is_rounded_where_it_is_written():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 2), "float32"), g: R.Tensor((2,), "float16")):
            y = R.astype(x, "float16")
            z = R.multiply(y, g)
            moved = R.astype(x, "float16")
            u = R.permute_dims(moved)
            v = R.astype(u, "float32")
            return (z, v)

    program, narrow = in_float32(program_of(Before))
    casts = [t for name, t in types(program) if name == "astype"]
    assert casts == ["float32", "float16", "float32", "float32"]
    assert narrow.nodes["node_y"] == "float16" and narrow.outputs == {0: "float16"}
