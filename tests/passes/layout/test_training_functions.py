"""Layout of training steps: gradients and statistics of blocked operands are those of plain ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.layout.layout import choose_layout
from hybridc.passes.program.program import Program, ProgramBuilder, operator_name, tensor_shape
from hybridc.passes.training.differentiate import differentiate
from hybridc.targets import ISAS
from tests.support.programs import drawn, run_llvm

op = relax.op


class Network:
    """Writes a network whose parameters are inputs."""

    def __init__(self, *shape: int) -> None:
        self.inputs = [relax.Var("x", relax.TensorType(shape, "float32"))]
        self.builder = ProgramBuilder(self.inputs)

    def emit(self, expr: relax.Expr) -> relax.Var:
        return self.builder.emit(expr, ("node",), "v")

    def parameter(self, *shape: int) -> relax.Var:
        self.inputs.append(relax.Var(f"w{len(self.inputs)}", relax.TensorType(shape, "float32")))
        return self.inputs[-1]

    def conv(self, x: relax.Var, outputs: int, groups: int = 1, **window: object) -> relax.Var:
        weight = self.parameter(outputs, tensor_shape(x)[1] // groups, 3, 3)
        y = self.emit(op.nn.conv2d(x, weight, groups=groups, **window))
        return self.emit(op.add(y, self.parameter(1, outputs, 1, 1)))

    def relu(self, x: relax.Var) -> relax.Var:
        return self.emit(op.nn.relu(x))

    def batch_norm(self, x: relax.Var) -> relax.Var:
        rows = [self.parameter(tensor_shape(x)[1]) for _ in range(4)]
        norm = self.emit(op.nn.batch_norm(x, *rows, axis=1, training=True))
        return self.emit(relax.TupleGetItem(norm, 0))

    def gradients(self, y: relax.Var) -> Program:
        """Of the sum of squares, with respect to all parameters that have one."""
        loss = self.emit(op.sum(self.emit(op.multiply(y, y))))
        program = self.builder.finish([loss])
        made = differentiate(program, [v.name for v in self.inputs[1:]])
        return canonicalize(made.program)


def _simple(net: Network) -> relax.Var:
    return net.conv(net.relu(net.conv(net.inputs[0], 32, padding=(1, 1))), 16, padding=(1, 1))


def _strided(net: Network) -> relax.Var:
    return net.conv(net.relu(net.conv(net.inputs[0], 16, padding=(1, 1))), 32, padding=(1, 1), strides=(2, 2))


def _normalised(net: Network) -> relax.Var:
    return net.relu(net.batch_norm(net.conv(net.inputs[0], 32, padding=(1, 1))))


def _pooled(net: Network) -> relax.Var:
    x = net.conv(net.inputs[0], 16, padding=(1, 1))
    x = net.emit(op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1)))
    return net.emit(op.nn.avg_pool2d(net.conv(x, 16, padding=(1, 1)), (2, 2), (2, 2)))


def _grouped(net: Network) -> relax.Var:
    x = net.relu(net.conv(net.inputs[0], 32, padding=(1, 1)))
    return net.conv(net.relu(net.conv(x, 64, groups=2, padding=(1, 1))), 16, padding=(1, 1))


def _pooled_plain(net: Network) -> relax.Var:
    """What comes before the pool, a product over channels, stays plain."""
    x = net.emit(op.permute_dims(net.conv(net.inputs[0], 16, padding=(1, 1)), [0, 1, 3, 2]))
    return net.conv(net.emit(op.nn.max_pool2d(x, (2, 2), (2, 2))), 16, padding=(1, 1))


def _filled(net: Network) -> relax.Var:
    """20 channels do not fill their blocks."""
    return net.conv(net.relu(net.conv(net.inputs[0], 20, padding=(1, 1))), 16, padding=(1, 1))


NETWORKS = (_simple, _strided, _normalised, _pooled, _grouped, _filled, _pooled_plain)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda f: f.__name__.strip("_"))
def test_gradients_are_those_of_the_plain_program(network: Callable[[Network], relax.Var]) -> None:
    net = Network(2, 3 if network is _simple else 16, 6, 6)
    before = net.gradients(network(net))
    after = choose_layout(before, ISAS["avx512"])
    assert all(after.origins[b.var.name] for b in after.bindings)
    values = [drawn(i, *tensor_shape(v)) / 4 for i, v in enumerate(before.main.params)]
    got, want = (run_llvm(p.module, *values, *p.weights.values()) for p in (after, before))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(np.abs(b).max(), 1))


@pytest.mark.parametrize("network", NETWORKS[:5], ids=lambda f: f.__name__.strip("_"))
def test_activations_stay_blocked_through_the_backward_pass(network: Callable[[Network], relax.Var]) -> None:
    net = Network(2, 16, 10, 10)
    after = choose_layout(net.gradients(network(net)), ISAS["avx512"])
    calls = [b for b in after.bindings if isinstance(b.value, relax.Call)]
    names = [operator_name(b.value) for b in calls]
    assert names.count("to_blocked") <= 2, "the input, and what the loss gives"
    assert names.count("to_plain") <= 1
    for binding in calls:
        if operator_name(binding.value) == "conv2d_wgrad":
            assert [len(tensor_shape(a)) for a in binding.value.args[1].fields] == [5, 5]
            assert len(tensor_shape(binding.var)) == 4


def test_plain_images_are_pooled_in_blocks() -> None:
    net = Network(2, 16, 10, 10)
    after = choose_layout(net.gradients(_pooled_plain(net)), ISAS["avx512"])
    calls = [b for b in after.bindings if isinstance(b.value, relax.Call)]
    pools = [b for b in calls if operator_name(b.value).startswith("max_pool")]
    assert [len(tensor_shape(b.value.args[1].fields[0])) for b in pools] == [5, 5]
