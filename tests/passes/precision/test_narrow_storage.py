"""Which tensors between kernels have 16 bits, and what reads and writes them."""

from __future__ import annotations

import numpy as np
from tvm import relax

from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.precision.narrow_storage import store_narrow
from hybridc.passes.precision.wide_program import NarrowTensors
from hybridc.passes.program.program import Program, ProgramBuilder, tensor_dtype
from hybridc.schedules.rule import PRECISION
from hybridc.targets import parse_target
from tests.support.programs import drawn

op = relax.op
NOTHING = NarrowTensors()
CPU, GPU = parse_target("avx2"), parse_target("cuda:sm_80+avx2")


def chain(*, scale: float = 1.0) -> Program:
    """Three products of two rows, the second of a view, and their names: a, b, c."""
    x = relax.Var("x", relax.TensorType((2, 8), "float32"))
    builder = ProgramBuilder([x])

    def product(x: relax.Var, depth: int, columns: int, name: str) -> relax.Var:
        weight = builder.weight(drawn(columns, depth, columns) * scale, f"{name}_weight")
        return builder.emit(op.matmul(x, weight), (name,), name)

    a = product(x, 8, 12, "a")
    b = product(builder.emit(op.reshape(a, (4, 6)), ("view",), "view"), 6, 10, "b")
    return fuse(builder.finish([product(b, 10, 3, "c")]))


def functions(program: Program) -> list[str]:
    return [g.name_hint for g in program.functions]


def types(program: Program) -> list[str]:
    return [tensor_dtype(b.var) for b in program.bindings]


def weight_types(program: Program) -> list[str]:
    return [value.dtype.name for value in program.weights.values()]


def test_tensors_that_only_chosen_functions_exchange_are_float16():
    program = chain()
    stored = store_narrow(program, NOTHING, CPU, frozenset(functions(program)))
    assert types(stored) == ["float16", "float16", "float16", "float32"]  # the second is a view
    assert weight_types(stored) == ["float16"] * 3
    assert tensor_dtype(stored.inputs[0]) == "float32"
    for function in stored.functions.values():
        assert function.attrs[PRECISION] == "fp16"


def test_functions_that_are_not_chosen_read_and_write_float32():
    program = chain()
    first, second, third = functions(program)
    stored = store_narrow(program, NOTHING, CPU, frozenset([first, third]))
    assert types(stored) == ["float32"] * 4 and weight_types(stored) == ["float16", "float32", "float16"]
    stored = store_narrow(program, NOTHING, CPU, frozenset([first, second]))
    assert types(stored) == ["float16", "float16", "float32", "float32"]
    (unchosen,) = [f for g, f in stored.functions.items() if g.name_hint == third]
    assert PRECISION not in unchosen.attrs


def test_types_of_the_model_are_kept():
    model = NarrowTensors({"x": "bfloat16"}, {0: "bfloat16"}, dict.fromkeys("ac", "bfloat16"))
    stored = store_narrow(chain(), model, CPU)
    assert types(stored) == ["bfloat16", "bfloat16", "float32", "bfloat16"]
    assert tensor_dtype(stored.inputs[0]) == "bfloat16"
    assert weight_types(stored) == ["bfloat16", "float32", "bfloat16"]


def test_weights_beyond_the_range_stay_float32():
    model = NarrowTensors({}, {}, dict.fromkeys("abc", "float16"))
    stored = store_narrow(chain(scale=1e5), model, CPU)
    assert weight_types(stored) == ["float32"] * 3 and types(stored)[0] == "float16"


def test_equal_functions_have_equal_names():
    """So that the tilings of a network share their code."""
    programs = [store_narrow(p, NOTHING, CPU, frozenset(functions(p))) for p in (chain(), chain())]
    assert functions(programs[0]) == functions(programs[1])


def test_a_program_without_such_tensors_is_left_alone():
    program = chain()
    assert store_narrow(program, NOTHING, CPU) is program
    assert np.isfinite(next(iter(program.weights.values()))).all()


def wide_chain(rows: int) -> tuple[Program, NarrowTensors]:
    """Products of a few rows, of which the last makes by far the largest tensor that a kernel reads."""
    x = relax.Var("x", relax.TensorType((rows, 32), "float32"))
    builder = ProgramBuilder([x])
    for name, depth, columns in (("a", 32, 32), ("b", 32, 24), ("c", 24, 512), ("d", 512, 8), ("e", 8, 8)):
        x = builder.emit(op.matmul(x, builder.weight(drawn(columns, depth, columns), name)), (name,), name)
    model = NarrowTensors({"x": "float16"}, {0: "float16"}, dict.fromkeys("abcde", "float16"))
    return fuse(builder.finish([x])), model


def test_small_tensors_stay_float32_where_no_kernel_needs_more_bytes():
    program, model = wide_chain(rows=4)
    for target in (CPU, GPU):
        # beside the largest tensor everything is as small as it can be
        assert types(store_narrow(program, model, target)) == [
            "float32", "float16", "float16", "float16", "float16",
        ]  # fmt: skip


def test_what_tensor_cores_multiply_stays_narrow():
    program, model = wide_chain(rows=32)
    assert types(store_narrow(program, model, CPU))[0] == "float32"
    assert types(store_narrow(program, model, GPU))[0] == "float16"
