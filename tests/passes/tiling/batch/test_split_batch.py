"""Training steps that go through their batch in parts, against the step that does not."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
from tvm import relax

from hybridc.frontend import read_model
from hybridc.models.builder import GraphBuilder
from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.program.program import Program, operator_name, tensor_dtype, tensor_shape
from hybridc.passes.tiling.batch.split_batch import split_batch
from hybridc.passes.tiling.tile import tile
from hybridc.passes.tiling.working_set import kernel_groups, largest_working_set_bytes
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
from hybridc.passes.training.step import training_programs
from tests.support.programs import run_llvm
from tests.support.tiled import Network

BATCH, CLASSES = 8, 5


def plain() -> onnx.ModelProto:
    """Convolutions, both kinds of pools, strides, and a dense layer with more weights than samples need."""
    g = GraphBuilder("plain", 0)
    x = g.relu(g.conv(g.input("x", (BATCH, 3, 16, 16)), 8, 3, padding=1))
    x = g.relu(g.conv(g.pool("MaxPool", x, 2, stride=2), 8, 3, stride=2, padding=1))
    return g.model(logits=g.gemm(g.flatten(g.pool("AveragePool", x, 2, stride=2)), CLASSES, 1.0))


def normalised() -> onnx.ModelProto:
    """BatchNorm behind each convolution, and a shortcut."""
    g = GraphBuilder("normalised", 1)
    x = g.relu(g.batch_norm(g.conv(g.input("x", (BATCH, 3, 16, 16)), 8, 3, padding=1, bias=False)))
    x = g.relu(g.add(x, g.batch_norm(g.conv(x, 8, 3, padding=1, bias=False))))
    return g.model(logits=g.gemm(g.flatten(g.global_average_pool(x)), CLASSES, 1.0))


def dropped() -> onnx.ModelProto:
    """Dropout, whose mask depends on the sample's number in the whole batch."""
    g = GraphBuilder("dropped", 2)
    x = g.dropout(g.relu(g.conv(g.input("x", (BATCH, 3, 16, 16)), 8, 3, padding=1)), 0.5)
    return g.model(logits=g.gemm(g.flatten(g.pool("MaxPool", x, 4, stride=4)), CLASSES, 1.0))


NETWORKS = {made.__name__: made for made in (plain, normalised, dropped)}


@cache
def step(network: str, loss: str = "softmax_cross_entropy") -> Program:
    spec = TrainingSpec(parse_loss(loss), parse_optimizer("sgd:lr=0.1,momentum=0.9"))
    made = training_programs(read_model(NETWORKS[network](), parameters=spec.trains), spec).step
    return canonicalize(Program(made.module, made.weights, made.origins))


def inputs(program: Program) -> list[np.ndarray]:
    """Seeded values; variances and scales are near one."""
    random = np.random.default_rng(7)
    values = []
    for var in program.main.params:
        if var.name not in program.weights:
            shape, dtype = tensor_shape(var), tensor_dtype(var)
            drawn = (
                random.integers(0, CLASSES, shape) if dtype == "int64" else random.uniform(0.1, 1.0, shape)
            )
            values.append(drawn.astype(dtype))
    return values


@cache
def expected_results(network: str, loss: str = "softmax_cross_entropy") -> list[np.ndarray]:
    before = step(network, loss)
    return run_llvm(before.module, *inputs(before), *before.weights.values())


def assert_same_step(after: Program, network: str, loss: str = "softmax_cross_entropy") -> None:
    """The same loss and new states of seeded inputs as of the step that is not in parts."""
    got = run_llvm(after.module, *inputs(after), *after.weights.values())
    wanted = expected_results(network, loss)
    assert len(got) == len(wanted)
    for result, expected in zip(got, wanted, strict=True):
        scale = max(np.abs(expected).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5 * scale)


def calls(program: Program, operator: str) -> list[relax.VarBinding]:
    bindings = [b for b in program.bindings if isinstance(b.value, relax.Call)]
    return [b for b in bindings if operator_name(b.value) == operator]


@pytest.mark.parametrize("network, share", [("plain", 0.2), ("normalised", 0.6), ("dropped", 0.6)])
def test_step_in_parts_gives_the_same_loss_and_states(network: str, share: float) -> None:
    before = step(network)
    after = split_batch(before, int(share * largest_working_set_bytes(before)))
    assert len(after.bindings) > len(before.bindings)
    assert set().union(*after.origins.values()) == set().union(*before.origins.values())
    assert_same_step(after, network)


@pytest.mark.parametrize("loss", ["mse", "bce_with_logits"])
def test_losses_over_all_elements_are_sums_over_the_batch(loss: str) -> None:
    before = step("plain", loss)
    after = split_batch(before, largest_working_set_bytes(before) // 2)
    assert len(after.bindings) > len(before.bindings)
    assert_same_step(after, "plain", loss)


def test_kernels_that_depend_on_the_batch_are_within_the_limit() -> None:
    before = step("plain")
    limit_bytes = largest_working_set_bytes(before) // 3
    after = split_batch(before, limit_bytes)
    assert max(g.size_bytes for g in kernel_groups(after) if not g.only_moves) <= limit_bytes


def test_one_part_is_done_with_before_the_next_begins() -> None:
    """Without BatchNorm: so that nothing of the forward pass is kept from part to part."""
    before = step("plain")
    after = split_batch(before, largest_working_set_bytes(before) // 2)
    names = [b.var.name for b in after.bindings]
    gradients = [names.index(b.var.name) for b in calls(after, "conv2d_wgrad")]
    forward = [names.index(b.var.name) for b in calls(after, "max_pool_with_indices")]
    parts = len(forward)
    assert parts > 1 and len(gradients) == 2 * parts
    assert all(max(gradients[2 * i : 2 * i + 2]) < forward[i + 1] for i in range(parts - 1))


def test_parts_share_functions_but_for_those_that_count_samples() -> None:
    before = step("dropped")
    after = split_batch(before, largest_working_set_bytes(before) // 2)

    def functions(operator: str) -> set[str]:
        return {b.value.args[0].name_hint for b in calls(after, operator)}

    assert len(functions("softmax_cross_entropy")) == 1
    assert len(functions("dropout")) == len(calls(after, "softmax_cross_entropy"))


def test_step_whose_kernels_fit_is_left_alone() -> None:
    before = step("plain")
    assert split_batch(before, largest_working_set_bytes(before)) is before


def test_network_without_sums_over_its_batch_is_left_alone() -> None:
    net = Network(BATCH, 3, 16, 16)
    before = net.program(net.conv(net.conv(net.x, 8), 8))
    assert split_batch(before, 1) is before


@pytest.mark.parametrize("divisor", [4, 20, pytest.param(100, marks=pytest.mark.slow)])
def test_cutting_samples_up_too_never_takes_more_memory(divisor: int) -> None:
    before = step("plain")
    limit_bytes = largest_working_set_bytes(before) // divisor
    in_parts = largest_working_set_bytes(split_batch(before, limit_bytes))
    assert (
        largest_working_set_bytes(tile(before, limit_bytes)) <= in_parts < largest_working_set_bytes(before)
    )


def test_same_program_comes_out_each_time() -> None:
    before = step("normalised")
    first, second = (split_batch(before, largest_working_set_bytes(before) // 4) for _ in range(2))
    assert first.module.script() == second.module.script()
