"""What passes know about operators by their names alone: one table, in which a new operator is one entry.

Facts that need the operator's loops are not here: `FunctionTable.pattern` asks TVM for them, and
`passes/tiling/slice_rules.py` says which part of its operands a part of a result reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, auto
from types import MappingProxyType

import tvm
from tvm import relax


class Fact(Flag):
    """One yes-or-no property of an operator."""

    UNARY = auto()
    """Each element of the result needs one element of one tensor. `clip` is unary: its bounds are numbers."""
    BINARY = auto()
    """Each element of the result needs one element of each of two tensors, broadcast to its shape."""
    TERNARY = auto()
    """The same of three tensors."""
    VIEW = auto()
    """Changes a shape and moves no bytes: it stays in the graph and gets no kernel."""
    MOVEMENT = auto()
    """Moves data and computes nothing."""
    CONVOLUTION = auto()
    """A convolution that is not transposed; operands are data and weights."""

    LITERAL = auto()
    """TVM legalises it with a scalar constant operand as a number in the kernel (not so for `where`)."""
    SCALAR_WEIGHT = auto()
    """`canonicalize` writes a weight of one element as such a number. Only for arithmetic: comparisons,
    remainders and integer operators are too rare in networks to gain from it."""
    BLOCKED = auto()
    """`layout` applies it to blocked data, instead of converting back before it: what follows convolutions in
    networks."""
    FINITE_PADDING = auto()
    """Blocked, and results are finite where operands are, so that the padding of a last block stays finite.
    Not so for `divide` and `log` (of 0), `sqrt` and `power` (of negative numbers), `exp` and `softplus`
    (overflow)."""
    EPILOGUE = auto()
    """`canonicalize` moves it before the interleaving of a transposed convolution's phases, so that it
    becomes an epilogue of the convolution. Only what commonly follows one."""
    CHEAP = auto()
    """The backward pass computes it again instead of keeping its result: arithmetic, and the functions that
    exporters spell GELU and normalisation out with."""

    ELEMENTWISE = UNARY | BINARY | TERNARY


_NONE = Fact(0)
_ARITHMETIC = Fact.BINARY | Fact.LITERAL | Fact.SCALAR_WEIGHT | Fact.BLOCKED | Fact.CHEAP
_ACTIVATION = Fact.UNARY | Fact.BLOCKED | Fact.FINITE_PADDING | Fact.EPILOGUE

_ENTRIES = (
    (_ARITHMETIC | Fact.FINITE_PADDING | Fact.EPILOGUE, "add subtract multiply maximum minimum"),
    (_ARITHMETIC | Fact.EPILOGUE, "divide"),
    (_ARITHMETIC, "power"),
    (Fact.BINARY | Fact.LITERAL, "floor_divide mod floor_mod log_add_exp atan2"),
    (Fact.BINARY | Fact.LITERAL, "equal not_equal greater greater_equal less less_equal"),
    (Fact.BINARY | Fact.LITERAL, "bitwise_and bitwise_or bitwise_xor left_shift right_shift"),
    (Fact.BINARY | Fact.LITERAL, "logical_and logical_or logical_xor"),
    (Fact.TERNARY, "where"),
    (_ACTIVATION, "nn.relu nn.leakyrelu clip nn.silu nn.gelu nn.gelu_tanh"),
    (_ACTIVATION | Fact.CHEAP, "sigmoid tanh"),
    (Fact.UNARY | Fact.BLOCKED | Fact.FINITE_PADDING | Fact.CHEAP, "erf negative abs"),
    (Fact.UNARY | Fact.BLOCKED | Fact.CHEAP, "exp log sqrt"),
    (Fact.UNARY | Fact.BLOCKED | Fact.FINITE_PADDING, "floor ceil round"),
    (Fact.UNARY | Fact.BLOCKED, "nn.softplus"),
    (Fact.UNARY | Fact.CHEAP, "rsqrt astype"),
    (Fact.UNARY, "nn.selu square sign trunc sin cos tan asin acos atan sinh cosh asinh acosh atanh"),
    (Fact.UNARY, "logical_not bitwise_not isnan isinf isfinite"),
    (Fact.VIEW, "reshape expand_dims squeeze flatten"),
    (Fact.MOVEMENT, "concat strided_slice permute_dims nn.pad split"),
    (Fact.CONVOLUTION, "nn.conv1d nn.conv2d nn.conv3d"),
)

OPERATORS: Mapping[str, Fact] = MappingProxyType(
    {name: facts for facts, names in _ENTRIES for name in names.split()}
)
"""Facts of each operator, by its name without the prefix `relax.`."""

_BY_BARE_NAME = {name.rpartition(".")[2]: facts for name, facts in OPERATORS.items()}


def has_fact(expr: relax.Expr, fact: Fact) -> bool:
    """Whether an expression calls an operator with this fact, or with any of several joined by `|`.

    False for whatever is not the call of an operator of the table.
    """
    if not isinstance(expr, relax.Call) or not isinstance(expr.op, tvm.ir.Op):
        return False
    return bool(OPERATORS.get(expr.op.name.removeprefix("relax."), _NONE) & fact)


def name_has_fact(name: str, fact: Fact) -> bool:
    """The same for a name without namespace, as `operator_name` gives it: `relu` for `nn.relu`."""
    return bool(_BY_BARE_NAME.get(name, _NONE) & fact)


def names_with(fact: Fact) -> tuple[str, ...]:
    """Names, without namespace, of the operators that have a fact, in the order of the table."""
    return tuple(name for name, facts in _BY_BARE_NAME.items() if facts & fact)
