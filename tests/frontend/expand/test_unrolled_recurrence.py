"""Recurrences as they are trained: onnxruntime's results, and gradients of whatever attributes there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import relax

from hybridc.errors import ModelError
from hybridc.frontend import read_model
from hybridc.passes.program.program import Program, tensor_shape
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.network import NetworkCopy
from tests.support.gradients import compiled
from tests.support.recurrent_models import Recurrent, drawn, expected

SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_results_are_onnxruntimes_and_change_as_gradients_say(seed: int) -> None:
    case = replace(drawn(seed), weights_fed=False)
    functions = case.attributes.get("activations")
    if functions:  # one is not continuous
        smooth = ["LeakyRelu" if name == "ThresholdedRelu" else name for name in functions]
        case = replace(case, attributes={**case.attributes, "activations": smooth})
    model = read_model(case.model(), parameters=lambda name: True)
    copy = NetworkCopy.of(Program(model.module, model.weights, model.origins), [])
    copy.run(lambda copied, call: None)
    emitter, outputs = copy.emitter, copy.outputs()
    random = np.random.default_rng(seed)
    weights = [random.uniform(0.5, 1.5, tensor_shape(y)) for y in outputs]
    total: relax.Expr = relax.const(0.0, "float64")
    for y, weight in zip(outputs, weights, strict=True):
        known = emitter.builder.weight(weight, "weights")
        total = emitter.emit(
            relax.op.add(total, relax.op.sum(relax.op.multiply(relax.op.astype(y, "float64"), known)))
        )
    values = {info.variable: {**case.feeds(), **model.parameters}[info.name] for info in model.inputs}
    numbers = [name for name, value in values.items() if value.dtype.kind == "f"]
    made = differentiate(emitter.builder.finish([total, *outputs], copy.functions()), numbers)
    run = compiled(made.program)
    results = run(values)
    for result, reference in zip(results[1:], expected(case), strict=False):
        np.testing.assert_allclose(result, reference, rtol=0, atol=2e-5 * np.abs(reference).max())
    gradients = {name: results[at] for name, (at,) in made.results.items()}
    # larger ones lead past more of what is clipped, where there is no gradient
    steps = {name: 1e-4 * random.standard_normal(values[name].shape) for name in gradients}
    ahead, behind = (
        float(run({**values, **{n: (values[n] + sign * step).astype("f") for n, step in steps.items()}})[0])
        for sign in (1, -1)
    )
    wanted = float(sum((gradients[name] * steps[name]).sum() for name in gradients))
    scale = sum(float(np.linalg.norm(gradients[n]) * np.linalg.norm(steps[n])) for n in gradients)
    assert abs((ahead - behind) / 2 - wanted) <= 3e-3 * scale


def test_too_many_steps_are_refused_by_name() -> None:
    with pytest.raises(ModelError) as refused:
        read_model(Recurrent("GRU", steps=1001).model(), parameters=lambda name: True)
    assert "GRU of 1001 steps" in str(refused.value)
