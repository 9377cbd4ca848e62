"""Which tensors between kernels are bf16, and that this changes no result."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tvm import relax

from hybridc.ir import Device
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.layout.layout import choose_layout
from hybridc.passes.precision.bf16_storage import keep_in_bf16
from hybridc.passes.precision.precision import reduce_precision
from hybridc.passes.program.prim_funcs import FunctionTable
from hybridc.passes.program.program import Program, ProgramBuilder, tensor_dtype
from hybridc.passes.schedule import constant_arguments
from hybridc.schedules.rule import PRECISION, Request
from hybridc.schedules.select import schedule
from hybridc.targets import Target, parse_target
from tests.schedules.cpu.conftest import Harness
from tests.support.amx import executing, tiles_here
from tests.support.narrow import vectors_here
from tests.support.programs import drawn

op = relax.op


class Writer:
    """Writes a small network."""

    def __init__(self, *shape: int) -> None:
        self.x = relax.Var("x", relax.TensorType(shape, "float32"))
        self.builder = ProgramBuilder([self.x])
        self.count = 0

    def __call__(self, expr: relax.Expr) -> relax.Var:
        self.count += 1
        return self.builder.emit(expr, (f"node_{self.count}",), f"v{self.count}")

    def weight(self, *shape: int) -> relax.Var:
        self.count += 1
        return self.builder.weight(drawn(self.count, *shape) / 8, "w")

    def conv(self, x: relax.Var, outputs: int, inputs: int, kernel: int, **attributes: int) -> relax.Var:
        w = self.weight(outputs, inputs, kernel, kernel)
        return self(op.nn.relu(self(op.nn.conv2d(x, w, padding=kernel // 2, **attributes))))

    def line(self, x: relax.Var, outputs: int, inputs: int, **attributes: int) -> relax.Var:
        return self(op.nn.conv1d(x, self.weight(outputs, inputs, 3), **attributes))

    def product(self, x: relax.Var, depth: int, columns: int) -> relax.Var:
        return self(op.nn.relu(self(op.matmul(x, self.weight(depth, columns)))))

    def program(self, *outputs: relax.Var) -> Program:
        return fuse(choose_layout(self.builder.finish(list(outputs)), parse_target("amx").isa))


def chains() -> dict[str, Program]:
    """Kernels of one kind behind each other, whose shapes fill neither vectors nor tiles, but for one."""
    images, rows, lines = Writer(1, 3, 19, 13), Writer(21, 37), Writer(2, 13, 330)
    y = images.conv(images.conv(images.x, 24, 3, 3), 40, 24, 3, strides=2)
    z = rows.product(rows.product(rows.x, 37, 70), 70, 33)
    whole = Writer(2, 32, 48)
    v = whole.product(whole.product(whole.x, 48, 64), 64, 96)
    u = lines.line(lines.line(lines.x, 20, 13, padding=2, dilation=2), 17, 20, padding=1)
    return {
        "images": images.program(images.conv(images.conv(y, 33, 40, 1), 16, 33, 1)),
        "rows": rows.program(rows.product(z, 33, 11)),
        "tiles": whole.program(whole.product(v, 96, 32)),
        "lines": lines.program(u),
    }


def reduced(program: Program, target: Target) -> Program:
    return reduce_precision(
        program, target, 1.0, lambda p, factors: dict.fromkeys(factors, 0.0), winograd=False
    )


def kept(program: Program) -> list[bool]:
    """Of each kernel's result, in order."""
    return [tensor_dtype(binding.var) == "uint16" for binding in program.bindings]


def computed(program: Program, harness: Harness) -> np.ndarray:
    """Of kernels scheduled and called one by one."""
    (source,) = [v for v in program.main.params if v.name not in program.weights]
    shape = [int(e) for e in source.ty.shape.values]
    values: dict[str, np.ndarray] = {source.name: drawn(7, *shape), **program.weights}
    constants = constant_arguments(program)
    for binding in program.bindings:
        name, arguments = (
            binding.value.args[0].name_hint,
            [values[a.name] for a in binding.value.args[1].fields],
        )
        function = program.module[name]
        made = schedule(
            Request(function, constants[name], Target((), harness.isa), winograd=False), Device.CPU
        )
        assert made is not None
        assert made.rule.startswith("bf16") == (PRECISION in (function.attrs or {}))
        (values[binding.var.name],) = harness.run(function, made, arguments)
    return values[program.outputs[0].name]


@pytest.fixture(params=[vectors_here(), tiles_here()])
def narrow(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with executing(request.param) as isa:
        yield Harness(isa)


@pytest.mark.parametrize("kind", ["images", "rows", "tiles", pytest.param("lines", marks=pytest.mark.slow)])
def test_results_are_the_same_bit_for_bit(narrow, kind, monkeypatch):
    program, target = chains()[kind], Target((), narrow.isa)
    found = reduced(program, target)
    assert kept(found)[0]
    monkeypatch.setattr("hybridc.passes.precision.precision.keep_in_bf16", lambda program, *_: program)
    unkept = reduced(program, target)
    assert not any(kept(unkept))
    np.testing.assert_array_equal(computed(found, narrow), computed(unkept, narrow))


def test_product_reads_bf16_rows_where_they_lie(narrow):
    program = reduced(chains()["tiles"], Target((), narrow.isa))
    constants = constant_arguments(program)
    sizes = []
    for binding in program.bindings:
        name = binding.value.args[0].name_hint
        request = Request(program.module[name], constants[name], Target((), narrow.isa))
        made = schedule(request, Device.CPU)
        assert made is not None
        sizes.append(sum(made.workspace_bytes))
    assert [size > 0 for size in sizes] == [True, False, False]


def images(*results: str) -> list[bool]:
    """What is kept of two convolutions with a residual around the second, then a third."""
    w = Writer(1, 32, 8, 8)
    first = w.conv(w.x, 32, 32, 3)
    second = w(op.add(w.conv(first, 32, 32, 3), first))
    third = w.conv(second, 32, 32, 1)
    named = {"first": first, "second": second, "third": third}
    return kept(reduced(w.program(*[named[name] for name in results]), parse_target("amx")))


def test_tensor_that_something_else_reads_too_stays_float():
    found = images("third")
    assert found[-1] is False and sum(found) == 1


def test_result_of_the_network_stays_float():
    assert not any(images("second", "third"))


@pytest.mark.parametrize("turned", [True, False])
def test_result_that_is_transposed_in_the_same_kernel_stays_float(turned):
    w, table = Writer(6, 6, 48), FunctionTable()
    y = w(op.matmul(w.x, w.weight(48, 64)))
    unfused = w.builder.finish([w(op.permute_dims(y, [1, 0, 2])) if turned else y])
    variable, _ = table.function(unfused.bindings, unfused)
    w = Writer(6, 6, 48)
    y = w(relax.call_tir(variable, [w.x, w.weight(48, 64)], relax.TensorType((6, 6, 64), "float32")))
    program = fuse(w.builder.finish([w.product(y, 64, 32)], table.functions))
    assert any(kept(reduced(program, parse_target("avx512_bf16")))) != turned


def test_beside_a_gpu_all_tensors_stay_floats():
    w = Writer(16, 32)
    program = fuse(w.builder.finish([w.product(w.product(w.x, 32, 32), 32, 32)]))
    assert any(kept(reduced(program, parse_target("amx"))))
    assert not any(kept(reduced(program, parse_target("cuda+amx"))))


def test_programs_without_such_tensors_are_left_as_they_are():
    program = chains()["rows"]
    assert keep_in_bf16(program, {}) is program
