"""Programs for the tests of Relax passes, written as TVMScript."""

from __future__ import annotations

import numpy as np
import tvm

from hybridc.passes.program.program import Program


def program_of(module: tvm.IRModule, weights: dict[str, np.ndarray] | None = None) -> Program:
    """A program from a module; every binding originates in an ONNX node of the same name."""
    main = module["main"]
    names = [binding.var.name for block in main.body.blocks for binding in block.bindings]
    return Program(module, weights or {}, {name: (f"node_{name}",) for name in names})


def drawn(seed: int, *shape: int) -> np.ndarray:
    """Seeded float32 values of about unit size."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


_TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})
"""At the default level LLVM turns some average pools of 2x2 into code that its own verifier refuses."""


def run_llvm(module: tvm.IRModule, *arguments: np.ndarray) -> list[np.ndarray]:
    """Run `main` with TVM's own unscheduled pipeline."""
    executable = tvm.compile(module, target=_TARGET)
    machine = tvm.relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(a) for a in arguments))
    return [item.numpy() for item in result]
