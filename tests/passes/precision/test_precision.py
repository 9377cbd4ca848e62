"""Which functions are marked for bf16, which are not, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from tvm import relax

from hybridc.machine import gpu_named
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.layout.layout import choose_layout
from hybridc.passes.precision.precision import (
    choose_halves,
    mark_integers,
    multiply_tf32,
    reduce_precision,
)
from hybridc.passes.program.program import Program, ProgramBuilder
from hybridc.schedules.rule import PRECISION, PRECISION_NOTE
from hybridc.targets import parse_target
from tests.support.programs import drawn

TILES, VECTORS = parse_target("amx"), parse_target("avx512_bf16")


def network() -> Program:
    """A 3x3 convolution, a depthwise one, a pooling and a matrix product."""
    x = relax.Var("x", relax.TensorType((1, 64, 28, 28), "float32"))
    builder = ProgramBuilder([x])

    def emit(expr: relax.Expr, name: str) -> relax.Var:
        return builder.emit(expr, (f"node_{name}",), name)

    w, d, m = (
        builder.weight(drawn(i, *s), "w") for i, s in enumerate([(64, 64, 3, 3), (64, 1, 3, 3), (64, 10)])
    )
    y = emit(relax.op.nn.conv2d(x, w, padding=1), "conv")
    y = emit(relax.op.nn.conv2d(y, d, padding=1, groups=64), "depthwise")
    y = emit(relax.op.reshape(emit(relax.op.mean(y, [2, 3], keepdims=True), "mean"), (1, 64)), "flat")
    program = builder.finish([emit(relax.op.matmul(y, m), "product")])
    return fuse(choose_layout(program, VECTORS.isa))


def reduced(program: Program, **options: Any) -> dict[str, str]:
    """What is noted of each function by the first word of its name."""
    given: dict[str, Any] = {
        "target": TILES,
        "rounding_error": 0.01,
        "errors": lambda p, factors: dict.fromkeys(factors, 0.003),
    }
    marked = reduce_precision(program, **given | options)
    return notes_of(marked)


def notes_of(program: Program) -> dict[str, str]:
    found = {}
    for variable, function in program.functions.items():
        attributes = function.attrs
        note = attributes.get(PRECISION) or attributes.get(PRECISION_NOTE) or ""
        found[variable.name_hint.split("_")[0]] = str(note)
    return found


def test_products_with_a_kernel_are_marked_and_others_tell_why_not() -> None:
    notes = reduced(network())
    assert notes["conv2d"] == notes["matmul"] == "bf16"
    assert notes["depthwise"] == "no bf16 kernel computes this"
    assert notes["mean"] == ""


def layers() -> Program:
    """A convolution, a product of matrices, and a mean."""
    x = relax.Var("x", relax.TensorType((1, 64, 56, 56), "float32"))
    builder = ProgramBuilder([x])
    w, m = (builder.weight(drawn(i, *s), "w") for i, s in enumerate([(64, 64, 3, 3), (3136, 512)]))
    y = builder.emit(relax.op.nn.conv2d(x, w, padding=1), ("conv",), "conv")
    y = builder.emit(relax.op.reshape(y, (64, 3136)), ("flat",), "flat")
    y = builder.emit(relax.op.matmul(y, m), ("product",), "product")
    return fuse(builder.finish([builder.emit(relax.op.mean(y, [1]), ("mean",), "mean")]))


def test_tf32_where_tensor_cores_are_faster() -> None:
    target = parse_target("cuda:sm_80+avx2")

    program = layers()

    def notes(gpu: str, error: float = 0.001) -> dict[str, str]:
        def errors(_: Program, factors: Mapping[str, Collection[int]]) -> dict[str, float]:
            return dict.fromkeys(factors, error)

        return notes_of(multiply_tf32(program, target, 0.01, errors, gpu_named(gpu)))

    fast = notes("a100")
    assert fast["conv2d"] == fast["matmul"] == "tf32" and fast["mean"] == ""
    assert notes("rtx-3090")["conv2d"] == "fp32 is predicted to be faster"
    assert "would change the result by 0.02" in notes("a100", 0.02)["matmul"]


def test_function_whose_error_exceeds_the_bound_stays_in_fp32() -> None:
    def errors(program: Program, factors: Mapping[str, Collection[int]]) -> dict[str, float]:
        return {name: 0.02 if name.startswith("conv2d") else 0.001 for name in factors}

    notes = reduced(network(), errors=errors)
    assert notes["conv2d"] == "rounding the factors would change the result by 0.02 of it"
    assert notes["matmul"] == "bf16"
    assert reduced(network(), errors=errors, rounding_error=0.03)["conv2d"] == "bf16"


def test_error_that_is_no_number_counts_as_too_large() -> None:
    notes = reduced(network(), errors=lambda p, factors: dict.fromkeys(factors, np.nan))
    assert "bf16" not in (notes["conv2d"], notes["matmul"])


def test_vectors_leave_a_convolution_to_winograd_where_that_is_faster() -> None:
    assert "Winograd" in reduced(network(), target=VECTORS, threads=2)["conv2d"]
    assert reduced(network(), target=VECTORS, winograd=False)["conv2d"] == "bf16"


def test_positions_of_data_and_weights_are_given_to_measure_their_rounding() -> None:
    seen: dict[str, Collection[int]] = {}

    def errors(program: Program, factors: Mapping[str, Collection[int]]) -> dict[str, float]:
        seen.update(factors)
        return dict.fromkeys(factors, 0.0)

    program = network()
    reduced(program, errors=errors)
    for name, (left, right) in seen.items():
        shapes = [len(p.shape) for p in program.module[name].params]
        assert shapes[left] == (5 if name.startswith("conv2d") else 2)
        assert shapes[right] == (6 if name.startswith("conv2d") else 2)


def test_functions_whose_tensors_may_be_float16_are_those_within_the_bound() -> None:
    program = network()

    def errors(program: Program, positions: Mapping[str, Collection[int]]) -> dict[str, float]:
        assert all(list(p) == list(range(len(program.module[name].params))) for name, p in positions.items())
        found = {"conv2d": 0.02, "mean": np.inf, "matmul": np.nan}
        return {name: found.get(name.split("_")[0], 0.001) for name in positions}

    marked, halved = choose_halves(program, 0.01, errors)
    assert halved and all(name.startswith("depthwise") for name in halved if "blocked" not in name)
    notes = notes_of(marked)
    assert notes["conv2d"] == "rounding what it reads and writes would change the result by 0.02 of it"
    assert notes["mean"] == "what it reads or writes exceeds the range of float16"
    assert "nan" in notes["matmul"] and notes["depthwise"] == ""


def test_programs_without_integers_are_told_to_have_none() -> None:
    notes = notes_of(mark_integers(network()))
    assert "not both quantized" in notes["conv2d"] and notes["mean"] == ""
