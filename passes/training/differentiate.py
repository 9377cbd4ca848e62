"""Reverse-mode differentiation of a program, in time linear in its bindings.

The forward pass is copied, with operators replaced by the forms that save what the backward pass needs
(pooling with indices, BatchNorm with batch statistics, dropout). Then the copied calls are visited in
reverse; each adds to the gradients of its arguments by the rule of its operator (Griewank and Walther,
Evaluating Derivatives, 2nd ed., chapter 3). Each distinct function is made once, so that a deep network with
few kinds of layers has few functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax

import hybridc.passes.training.rules  # noqa: F401  (registers the rules)
from hybridc.errors import ModelError
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    substitute,
    tensor_dtype,
    tensor_shape,
    variables,
)
from hybridc.passes.training.gradients import (
    FORMS,
    GRADIENTS,
    Emitter,
    Gradient,
    Recorded,
    Reverse,
    operands,
    rule_name,
)
from hybridc.passes.training.recompute import recompute_cheap
from hybridc.passes.training.rules.matmul import shared_matrices, sum_of_products

SEED = "dropout_seed"
"""Name of the input, an int64 scalar, that is added to a program with dropout. Each step takes another."""

Update = Callable[[Emitter, relax.Var, relax.Expr], Sequence[relax.Expr]]
"""(emitter, parameter, its gradient) -> results to return."""


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A program that computes gradients, or what `update` makes of them."""

    program: Program
    """Returns what the given program does, and then the results of all parameters."""
    results: Mapping[str, tuple[int, ...]]
    """Output positions of each parameter's results; parameters that the loss does not depend on have none."""
    has_seed: bool
    """Whether the last input is `SEED`."""


def differentiate(
    program: Program,
    parameters: Sequence[str],
    *,
    loss: int = 0,
    update: Update | None = None,
    norm_parts: int = 1,
    examples: str | None = None,
) -> Differentiated:
    """The gradient of the output at position `loss`, a scalar, with respect to inputs, by name.

    `update` is called when a parameter's gradient is complete, right after the last kernel that reads the
    old parameter; what it returns are the parameter's results. By default that is the gradient itself.
    BatchNorm takes the statistics of `norm_parts` parts of a batch together, each of which a rank has; or of
    as many examples as the input of the name `examples` says.

    Requires: `main` normalised, straight-line, static shapes.
    Raises: ModelError HC160 where an operator between a parameter and the loss has no gradient, HC161 where
    the loss depends on no parameter, HC162 where it is not a scalar.
    """
    return _Differentiator(program, parameters, norm_parts, examples).run(
        loss, update or (lambda emitter, parameter, gradient: [gradient])
    )


class _Differentiator:
    def __init__(
        self, program: Program, parameters: Sequence[str], norm_parts: int, examples: str | None
    ) -> None:
        self.old = program
        inputs = {v.name: v for v in program.inputs}
        self.parameters = [inputs[name] for name in parameters]
        self.has_seed = any(
            rule_name(b.value) == "nn.dropout" for b in program.bindings if isinstance(b.value, relax.Call)
        )
        seed = relax.Var(SEED, relax.TensorType((), "int64")) if self.has_seed else None
        builder = ProgramBuilder([*inputs.values(), *([] if seed is None else [seed])])
        self.reverse = Reverse(
            builder,
            seed=seed,
            active=set(self.parameters),
            norm_parts=norm_parts,
            examples=None if examples is None else inputs[examples],
        )
        self.reverse.library = {g.name_hint: function for g, function in program.functions.items()}
        self.new = builder.take_parameters(program)
        self.adjoints: dict[relax.Var, relax.Expr] = {}
        self.tuple_adjoints: dict[relax.Var, list[relax.Expr | None]] = {}

    def run(self, loss: int, update: Update) -> Differentiated:
        for binding in self.old.bindings:
            self._forward(binding)
        outputs = [substitute(output, self._renamed) for output in self.old.outputs]
        tape, self.reverse.tape = self.reverse.tape, None
        forward = set(self.reverse.values)
        assert tape is not None
        results = self._backward(tape, outputs[loss], update)
        positions: dict[str, tuple[int, ...]] = {}
        for parameter in self.parameters:
            made = results.get(parameter, [])
            if made:
                positions[parameter.name] = tuple(range(len(outputs), len(outputs) + len(made)))
            outputs.extend(made)
        functions = {**self.old.functions, **dict(self.reverse.functions.values())}
        program = recompute_cheap(self.reverse.builder.finish(outputs, functions), forward)
        return Differentiated(program, positions, self.has_seed)

    # -------------------------------------------------------------------------------------- forward

    def _renamed(self, var: relax.Var) -> relax.Expr:
        return self.new.get(var, var)

    def _forward(self, binding: relax.VarBinding) -> None:
        """Emit a binding in its training form."""
        reverse, old = self.reverse, binding.var
        reverse.origins, reverse.name = self.old.origins.get(old.name, ()), old.name
        value = substitute(binding.value, self._renamed)
        if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
            value = value.tuple_value.fields[value.index]
        if isinstance(value, relax.Call):
            form = FORMS.get(rule_name(value))
            made = form(reverse, value) if form else None
            value = reverse.emit(value) if made is None else made
        elif isinstance(value, relax.TupleGetItem):
            value = reverse.emit(value)
        self.new[old] = value

    # ------------------------------------------------------------------------------------- backward

    def _backward(
        self, tape: list[Recorded], loss: relax.Expr, update: Update
    ) -> dict[relax.Var, Sequence[relax.Expr]]:
        """Emit gradients in reverse; returns each parameter's results."""
        if not self.reverse.wanted(loss):
            raise ModelError(
                "HC161",
                "the loss depends on no parameter that is trained",
                remedy="name parameters of the network, or freeze fewer",
            )
        if math.prod(tensor_shape(loss)) != 1:
            raise ModelError("HC162", f"the loss is not a scalar: it has shape {tensor_shape(loss)}")
        one = np.ones(tensor_shape(loss), tensor_dtype(loss))
        self.reverse.shared_matrices = shared_matrices(tape)
        self.adjoints[loss] = relax.const(one, one.dtype.name)
        complete = self._completed(tape)
        results: dict[relax.Var, Sequence[relax.Expr]] = {}
        for position in reversed(range(len(tape))):
            self._through(tape[position])
            for parameter in complete.get(position, []):
                gradient = self._taken(parameter)
                if gradient is not None:
                    results[parameter] = update(self.reverse, parameter, gradient)
        return results

    def _completed(self, tape: list[Recorded]) -> dict[int, list[relax.Var]]:
        """Parameters by the position of their first reader: in reverse order nothing reads them after it."""
        first: dict[relax.Var, int] = {}
        parameters = set(self.parameters)
        for position, recorded in enumerate(tape):
            for var in variables(recorded.value):
                if var in parameters:
                    first.setdefault(var, position)
        complete: dict[int, list[relax.Var]] = {}
        for parameter, position in first.items():
            complete.setdefault(position, []).append(parameter)
        return complete

    def _through(self, recorded: Recorded) -> None:
        """Add what a binding contributes to the gradients of its arguments."""
        var, value, reverse = recorded.var, recorded.value, self.reverse
        reverse.origins, reverse.name = recorded.origins, f"{var.name}_gradient"
        dy = self._taken(var)
        if dy is None:
            return
        if isinstance(value, relax.TupleGetItem):
            width = len(value.tuple_value.ty.fields)
            self._add_field(
                self.tuple_adjoints.setdefault(value.tuple_value, [None] * width), value.index, dy
            )
            return
        rule = GRADIENTS.get(rule_name(value))
        gradients = None if rule is None else rule(reverse, value, var, dy)
        if gradients is None:
            raise _no_gradient(recorded)
        for argument, gradient in zip(operands(value), gradients, strict=True):
            self._add(argument, gradient)

    def _taken(self, var: relax.Var) -> Gradient:
        """The gradient with respect to a variable, complete."""
        products = self.reverse.products.pop(var, None)
        if products is not None:
            self._add(var, sum_of_products(self.reverse, var, products))
        return self.tuple_adjoints.pop(var, None) or self.adjoints.pop(var, None)

    def _add(self, argument: relax.Expr, gradient: Gradient) -> None:
        if isinstance(gradient, list):
            for item, part in zip(argument.fields, gradient, strict=True):
                self._add(item, part)
        elif gradient is not None and self.reverse.wanted(argument):
            more = self.reverse.emit(gradient) if isinstance(gradient, relax.Call) else gradient
            assert tensor_shape(more) == tensor_shape(argument), f"gradient of {argument}: {more.ty}"
            self.adjoints[argument] = self._sum(self.adjoints.get(argument), more)

    def _add_field(self, fields: list[relax.Expr | None], index: int, gradient: relax.Expr) -> None:
        fields[index] = self._sum(fields[index], gradient)

    def _sum(self, gradient: relax.Expr | None, more: relax.Expr) -> relax.Expr:
        return more if gradient is None else self.reverse.emit(relax.op.add(gradient, more))


def _no_gradient(recorded: Recorded) -> ModelError:
    return ModelError(
        "HC160",
        f"{rule_name(recorded.value)} has no gradient, and lies between a trained parameter and the loss",
        where=f"node {', '.join(recorded.origins)}",
        remedy="freeze the parameters before it (--freeze), or export the network without it",
    )
