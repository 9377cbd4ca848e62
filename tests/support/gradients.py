"""Gradients of small float64 programs, held against central differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tvm import relax

from hybridc.passes.program.program import Program, ProgramBuilder
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from tests.support import programs

Build = Callable[..., relax.Expr]
"""(emitter, a variable for each value) -> a tensor."""
Run = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


def program_of(build: Build, values: Mapping[str, np.ndarray]) -> Program:
    """The sum of a network's results, each with a random weight, and the results themselves."""
    inputs = {n: relax.Var(n, relax.TensorType(v.shape, v.dtype.name)) for n, v in values.items()}
    emitter = Emitter(ProgramBuilder(list(inputs.values())), origins=("node",), name="y")
    result = build(emitter, **inputs)
    if not isinstance(result, relax.Var):
        result = emitter.emit(result)
    shape = tuple(int(n) for n in result.ty.shape)
    weights = emitter.builder.weight(np.random.default_rng(99).uniform(0.5, 1.5, shape), "weights")
    loss = emitter.emit(relax.op.sum(relax.op.multiply(result, weights)), "loss")
    return emitter.builder.finish([loss, result], dict(emitter.functions.values()))


def compiled(program: Program) -> Run:
    """Run a program on the CPU as TVM compiles it, without schedules; weights are known."""
    main = programs.compiled(program.module)
    names = [v.name for v in program.main.params]

    def run(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        known = {**program.weights, **values}
        return main(*(known[n] for n in names))

    return run


def gradients_of(build: Build, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the weighted sum, with respect to every floating point value."""
    return _evaluated(build, values)[1]


def _evaluated(build: Build, values: Mapping[str, np.ndarray]) -> tuple[Run, dict[str, np.ndarray]]:
    parameters = [name for name, value in values.items() if value.dtype.kind == "f"]
    made = differentiate(program_of(build, values), parameters)
    run = compiled(made.program)
    outputs = run(values)
    return run, {name: outputs[at] for name, (at,) in made.results.items()}


def assert_gradients(
    build: Build, values: Mapping[str, np.ndarray], *, step: float = 1e-5, tolerance: float = 1e-6
) -> None:
    """Every value's gradient gives the change of the weighted sum along random directions.

    `step` may be large where the network is linear.
    """
    rng = np.random.default_rng(7)
    run, gradients = _evaluated(build, values)
    assert gradients
    for name, gradient in gradients.items():
        assert gradient.shape == values[name].shape and gradient.dtype == values[name].dtype
        for _ in range(3):
            direction = rng.standard_normal(gradient.shape)
            ahead, behind = (
                float(run({**values, name: values[name] + sign * step * direction})[0]) for sign in (1, -1)
            )
            expected = (ahead - behind) / (2 * step)
            found = float((gradient * direction).sum())
            scale = np.linalg.norm(gradient) * np.linalg.norm(direction) + 1e-3
            assert abs(found - expected) <= tolerance * scale, (name, found, expected)


def side_by_side(results: Sequence[relax.Expr], emitter: Emitter) -> relax.Expr:
    """Tensors of any shapes as one, so that one program tests many operators."""
    bound = [r if isinstance(r, relax.Var) else emitter.emit(r) for r in results]
    return relax.op.concat([relax.op.reshape(r, (-1,)) for r in bound], 0)


def normal(seed: int, *shape: int) -> np.ndarray:
    """Seeded float64 values of about unit size."""
    return np.random.default_rng(seed).standard_normal(shape)


def distinct(seed: int, *shape: int) -> np.ndarray:
    """Seeded float64 values between -1 and 1 that keep a distance from each other and from 0."""
    count = int(np.prod(shape))
    ranks = np.random.default_rng(seed).permutation(count)
    return ((2 * ranks + 1.4) / count - 1).reshape(shape)
