"""A network copied into a new program, for training or for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from hybridc.frontend import ValueInfo
from hybridc.passes.program.program import Program, ProgramBuilder, is_op, substitute, tensor_shape
from hybridc.passes.training.gradients import Emitter, constant


@dataclass
class NetworkCopy:
    """The network's bindings in a new program, some of them rewritten."""

    emitter: Emitter
    old: Program
    new: dict[relax.Var, relax.Expr]

    @staticmethod
    def of(program: Program, more: Iterable[ValueInfo]) -> NetworkCopy:
        """Nothing copied yet; `more` are inputs besides the program's own."""
        added = [relax.Var(v.variable, relax.TensorType(v.shape, v.dtype)) for v in more]
        emitter = Emitter(ProgramBuilder([*program.inputs, *added]))
        emitter.library = {g.name_hint: function for g, function in program.functions.items()}
        return NetworkCopy(emitter, program, emitter.builder.take_parameters(program))

    def run(self, rewrite: Callable[[NetworkCopy, relax.Expr], relax.Expr | None]) -> None:
        """`rewrite` gives the new value of a binding, or None to copy it."""
        for binding in self.old.bindings:
            self.emitter.origins = self.old.origins.get(binding.var.name, ())
            self.emitter.name = binding.var.name
            value = substitute(binding.value, lambda var: self.new[var])
            if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
                value = value.tuple_value.fields[value.index]
            if not isinstance(value, relax.Var | relax.Tuple):
                made = rewrite(self, value)
                value = self.emitter.emit(value) if made is None else made
            self.new[binding.var] = value
        self.emitter.origins = ()

    def outputs(self) -> list[relax.Expr]:
        """The network's, once it is copied."""
        return [substitute(output, lambda var: self.new[var]) for output in self.old.outputs]

    def functions(self) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
        """What the new program calls."""
        return {**self.old.functions, **dict(self.emitter.functions.values())}


def is_training_norm(expr: relax.Expr) -> bool:
    """Whether this is a BatchNorm that uses the batch's statistics."""
    return is_op(expr, "nn.batch_norm") and bool(expr.attrs.training)


def with_statistics(
    copy: NetworkCopy, call: relax.Expr, statistics: dict[str, relax.Expr]
) -> relax.Expr | None:
    """BatchNorm in training; `statistics` receives its new running ones. One that is applied twice updates
    them twice."""
    if not is_training_norm(call):
        return None
    running = [statistics.get(argument.name, argument) for argument in call.args[3:]]
    made = copy.emitter.emit(relax.Call(call.op, [*call.args[:3], *running], call.attrs))
    items = [copy.emitter.item(made, index) for index in range(3)]
    statistics.update({argument.name: item for argument, item in zip(call.args[3:], items[1:], strict=True)})
    return relax.Tuple(items)


def evaluated(copy: NetworkCopy, call: relax.Expr) -> relax.Expr | None:
    """Dropout is the identity; BatchNorm scales and shifts by its running statistics."""
    if is_op(call, "nn.dropout"):
        return relax.Tuple([call.args[0], call.args[0]])
    if not is_op(call, "nn.batch_norm"):
        return None
    if all(copy.emitter.known(argument) is not None for argument in call.args[1:]):
        return None  # canonicalize folds it
    data, gamma, beta, mean, variance = call.args
    op, axis = relax.op, int(call.attrs.axis)
    shape = tuple(extent if i == axis else 1 for i, extent in enumerate(tensor_shape(data)))
    deviation = op.sqrt(op.add(variance, constant(float(call.attrs.epsilon), variance)))
    scale = copy.emitter.emit(op.divide(gamma, deviation))
    shift = op.subtract(beta, op.multiply(mean, scale))
    scaled = op.multiply(data, op.reshape(scale, shape))
    return relax.Tuple([copy.emitter.emit(op.add(scaled, op.reshape(shift, shape))), mean, variance])
