"""Updates against PyTorch's optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.program.program import ProgramBuilder, is_op
from hybridc.passes.read_graph import read_graph
from hybridc.passes.training import spec
from hybridc.passes.training.gradients import Emitter
from hybridc.passes.training.optimizers import Adam, Sgd, UpdateRule, emit_update
from tests.support.gradients import compiled, normal

SGD = spec.Optimizer()
RATES = [0.1, 0.05, 0.2, 0.1]

CASES: dict[str, tuple[UpdateRule, spec.Optimizer, str, dict[str, Any]]] = {
    "sgd": (Sgd(), SGD, "SGD", {}),
    "decay": (Sgd(weight_decay=0.1), SGD, "SGD", {"weight_decay": 0.1}),
    "momentum": (Sgd(0.9, weight_decay=0.1), SGD, "SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (
        Sgd(0.9, nesterov=True, weight_decay=0.1),
        SGD,
        "SGD",
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (Adam(), spec.Optimizer("adam"), "Adam", {}),
    "adam_decay": (
        Adam(0.8, 0.99, 1e-3, 0.1),
        spec.Optimizer("adam", beta1=0.8, beta2=0.99),
        "Adam",
        {"betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "adamw": (
        Adam(weight_decay=0.1, decoupled=True),
        spec.Optimizer("adamw", weight_decay=0.1),
        "AdamW",
        {"weight_decay": 0.1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_pytorchs(name: str) -> None:
    torch = pytest.importorskip("torch")
    optimizer, scalars, theirs, options = CASES[name]
    shape = (3, 4)
    tensor, scalar = relax.TensorType(shape, "float64"), relax.TensorType((), "float64")
    own = ["w", "g", *optimizer.states]
    inputs = {n: relax.Var(n, tensor) for n in own} | {n: relax.Var(n, scalar) for n in optimizer.scalars}
    emitter = Emitter(ProgramBuilder(list(inputs.values())))
    states = [inputs[n] for n in optimizer.states]
    results = emit_update(optimizer, emitter, inputs["w"], inputs["g"], states, inputs)
    program = emitter.builder.finish(list(results), dict(emitter.functions.values()))
    assert sum(is_op(b.value, "call_tir") for b in program.bindings) == 1
    run = compiled(program)

    leaf = torch.tensor(normal(0, *shape), requires_grad=True)
    oracle = getattr(torch.optim, theirs)([leaf], lr=1.0, **options)
    values = {n: np.zeros(shape) for n in own} | {"w": normal(0, *shape)}
    for step, rate in enumerate(RATES, 1):
        values["g"] = normal(step, *shape)
        values |= {n: np.array(v) for n, v in scalars.scalar_values(rate, step).items()}
        new = run(values)
        values.update(zip(["w", *optimizer.states], new, strict=True))
        oracle.param_groups[0]["lr"] = rate
        leaf.grad = torch.tensor(values["g"])
        oracle.step()
        np.testing.assert_allclose(values["w"], leaf.detach().numpy(), rtol=1e-10)


def test_new_values_may_take_the_place_of_old_ones() -> None:
    """Nesterov's step reads the gradient again behind the new momentum, which so cannot take its place."""
    optimizer = Sgd(0.9, nesterov=True, weight_decay=0.1)
    tensor, scalar = relax.TensorType((3, 4), "float32"), relax.TensorType((), "float32")
    w, g, momentum = (relax.Var(name, tensor) for name in ("w", "g", "momentum"))
    rate = relax.Var("rate", scalar)
    emitter = Emitter(ProgramBuilder([w, g, momentum, rate]))
    results = emit_update(optimizer, emitter, w, g, [momentum], {"learning_rate": rate})
    program = fuse(emitter.builder.finish(list(results), dict(emitter.functions.values())))
    [kernel] = read_graph(program, {}).kernels
    new_momentum, new_w = kernel.outputs
    assert set(kernel.may_overwrite) == {(new_w, "w"), (new_w, "g"), (new_momentum, "momentum")}
