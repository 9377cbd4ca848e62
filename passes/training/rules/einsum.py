"""Gradients of sums of products, as the importer makes a function of each `Einsum`."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax, te, tirx

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, extents, gradient, operands, placeholder
from hybridc.schedules.cpu.core.nest import loads, read_nest


@dataclass(frozen=True, slots=True)
class _Product:
    """A sum of products: the letters of each factor's axes and of the result's, and how many each counts."""

    factors: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    extents: dict[str, int]

    def other_letters(self, number: int) -> list[str]:
        """Those that a factor's own axes do not have."""
        others = [self.result, *(f for i, f in enumerate(self.factors) if i != number)]
        letters = dict.fromkeys(letter for of_one in others for letter in of_one)
        return [letter for letter in letters if letter not in self.factors[number]]


@gradient("einsum")
def _einsum(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Of each factor: the sum of dy times the other factors, over all axes but its own."""
    factors = operands(call)
    product = _read(reverse.library[call.args[0].name_hint], len(factors))

    def part(number: int) -> relax.Expr:
        others = [factor for i, factor in enumerate(factors) if i != number]
        shapes = tuple(tensor_shape(f) for f in (*factors, y))
        return reverse.call(
            ("einsum_gradient", number, product.factors, product.result, shapes),
            lambda: _gradient(product, number, dy, others),
            [dy, *others],
            relax.TensorType(tensor_shape(factors[number]), tensor_dtype(dy)),
        )

    return [part(i) if reverse.wanted(factor) else None for i, factor in enumerate(factors)]


def _read(function: tirx.PrimFunc, count: int) -> _Product:
    nest = read_nest(function)
    assert nest is not None and len(nest.blocks) == 1, "the importer's functions have one block"
    [block] = nest.blocks
    letters = {var: f"a{i}" for i, var in enumerate((*block.spatial, *block.reduce))}
    found = {load.source: load for load in loads(block.value)}
    factors = [found[parameter] for parameter in list(function.params)[:count]]
    return _Product(
        tuple(tuple(letters[index] for index in factor.indices) for factor in factors),
        tuple(letters[index] for index in block.indices),
        {letter: block.extents[var] for var, letter in letters.items()},
    )


def _gradient(product: _Product, number: int, dy: relax.Expr, others: list[relax.Expr]) -> tirx.PrimFunc:
    own = product.factors[number]
    tensors = [placeholder(dy, "dy"), *(placeholder(e, f"factor{i}") for i, e in enumerate(others))]
    axes = [product.result, *(f for i, f in enumerate(product.factors) if i != number)]
    summed = {
        letter: te.reduce_axis((0, tirx.IntImm("int64", product.extents[letter])), letter)
        for letter in product.other_letters(number)
    }

    def body(*at: tirx.Var) -> tirx.Expr:
        place = {**summed, **dict(zip(own, at, strict=True))}
        term = tensors[0][tuple(place[letter] for letter in axes[0])]
        for tensor, letters in zip(tensors[1:], axes[1:], strict=True):
            term = term * tensor[tuple(place[letter] for letter in letters)]
        same = [at[i] == at[own.index(letter)] for i, letter in enumerate(own) if own.index(letter) != i]
        if same:
            term = tirx.if_then_else(tirx.all(*same), term, tirx.const(0, tensors[0].dtype))
        return te.sum(term, axis=list(summed.values())) if summed else term

    shape = extents([product.extents[letter] for letter in own])
    return te.create_prim_func([*tensors, te.compute(shape, body, name="einsum_gradient")])
