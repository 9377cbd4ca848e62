"""Programs for the tests of Relax passes, written as TVMScript."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from hybridc.checks import markers, read_marker
from hybridc.ir import CheckKind
from hybridc.passes.program.legalize import LEGALIZATIONS
from hybridc.passes.program.program import Program


def program_of(module: tvm.IRModule, weights: dict[str, np.ndarray] | None = None) -> Program:
    """A program from a module; every binding originates in an ONNX node of the same name."""
    main = module["main"]
    names = [binding.var.name for block in main.body.blocks for binding in block.bindings]
    return Program(module, weights or {}, {name: (f"node_{name}",) for name in names})


def built_program(
    build: Callable[..., relax.Expr], shape: tuple[int, ...], weights: Sequence[np.ndarray] = ()
) -> Program:
    """A program of one float32 input and weights that computes `build(emit, x, *weights)`."""
    builder = relax.BlockBuilder()
    parameters = {f"w{i}": value for i, value in enumerate(weights)}
    variables = [
        relax.Var("x", relax.TensorType(shape, "float32")),
        *(relax.Var(n, relax.TensorType(v.shape, "float32")) for n, v in parameters.items()),
    ]
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(relax.Tuple([build(builder.emit, *variables)]))
        builder.emit_func_output(result)
    return program_of(builder.get(), parameters)


def drawn(seed: int, *shape: int) -> np.ndarray:
    """Seeded float32 values of about unit size."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unchecked(module: tvm.IRModule) -> tvm.IRModule:
    """A module whose operators are functions that trust what they are fed: checks are for scheduled ones."""
    module = relax.transform.LegalizeOps(dict(LEGALIZATIONS))(module)

    def value(call: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        call = mutator.default_mutate(call)
        marker = read_marker(call)
        if marker is None:
            return call
        if marker.kind is CheckKind.DIVISOR:
            return marker.value
        return tirx.Select(marker.value < 0, marker.value + (marker.upper + 1), marker.value)

    changed = {}
    for name, function in module.functions.items():
        if isinstance(function, tirx.PrimFunc) and markers(function.body):
            body = tvm_ffi.structural_mutate(function.body, ((ir.Call, value),))
            function = tirx.PrimFunc(list(function.params), body, function.ret_type, function.attrs)
        changed[name] = function
    return tvm.IRModule(changed, attrs=module.attrs)


_TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})
"""Programs run a few times: compiling is what takes time. At the default level LLVM also turns some average
pools of 2x2 into code that its own verifier refuses."""


def compiled(module: tvm.IRModule) -> Callable[..., list[np.ndarray]]:
    """`main` of a module with TVM's own unscheduled pipeline.

    Without what functions ask of their arguments, which the types of the module say already: it is more code
    than the functions themselves, and took half of the time of all that is compiled here.
    """
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        executable = tvm.compile(unchecked(module), target=_TARGET)
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]

    def run(*arguments: np.ndarray) -> list[np.ndarray]:
        result = main(*(tvm.runtime.tensor(np.asarray(a, order="C")) for a in arguments))
        return [item.numpy() for item in result]

    return run


def run_llvm(module: tvm.IRModule, *arguments: np.ndarray) -> list[np.ndarray]:
    """Run `main` once."""
    return compiled(module)(*arguments)
