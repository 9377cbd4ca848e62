"""Updates of parameters: all new values of a parameter in one function of single elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import relax, te, tirx

from hybridc.passes.training.gradients import placeholder

Element = Callable[[Mapping[str, tirx.Expr]], tirx.Expr]
"""A new value from the elements of the arguments, and of the results before it, by name."""


def update(arguments: Mapping[str, relax.Expr], results: Mapping[str, Element]) -> tirx.PrimFunc:
    """The results, each shaped like the first argument; the others are shaped alike, or scalars."""
    values = {name: placeholder(argument, name) for name, argument in arguments.items()}
    inputs, outputs = list(values.values()), []
    for name, element in results.items():
        values[name] = te.compute(inputs[0].shape, _body(element, dict(values)), name=name)
        outputs.append(values[name])
    return te.create_prim_func([*inputs, *outputs])


def _body(element: Element, values: Mapping[str, te.Tensor]) -> Callable[..., tirx.Expr]:
    def body(*at: tirx.Var) -> tirx.Expr:
        return element({name: value[at if value.shape else ()].asobject() for name, value in values.items()})

    return body
