"""Gradient rules, one family of operators a file; importing the package registers all of them."""

from hybridc.passes.training.rules import (
    activations,
    convolutions,
    dropout,
    einsum,
    elementwise,
    indexing,
    local_response,
    losses,
    matmul,
    normalisation,
    pooling,
    reductions,
    resampling,
    resize,
    shapes,
)

__all__ = [
    "activations",
    "convolutions",
    "dropout",
    "einsum",
    "elementwise",
    "indexing",
    "local_response",
    "losses",
    "matmul",
    "normalisation",
    "pooling",
    "reductions",
    "resampling",
    "resize",
    "shapes",
]
