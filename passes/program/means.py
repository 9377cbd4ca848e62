"""Means over the ranks of a training job: kernels that one rank alone runs as a copy."""

from __future__ import annotations

from tvm import relax, tirx

from hybridc.passes.program.program import is_op, operator_name

MEAN_OF_RANKS = "mean_of_ranks"
"""Name of such a function, and, once composed, an attribute of it: its results are its parameters, in their
order."""


def is_mean_of_ranks(expr: relax.Expr) -> bool:
    """Whether an expression calls such a function, as an operator."""
    # TVM numbers functions of one name
    return is_op(expr, "call_tir") and operator_name(expr).rstrip("0123456789_") == MEAN_OF_RANKS


def has_means_of_ranks(function: tirx.PrimFunc) -> bool:
    """Whether a composed function is such means."""
    return MEAN_OF_RANKS in (function.attrs or {})
