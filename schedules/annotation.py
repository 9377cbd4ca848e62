"""What passes note on the block of a convolution for schedule rules: the operator and its geometry.

A rule could read strides, padding and groups off the indices of the block, but only by trying some points of
them. The pass that writes the block knows them. Annotations of a block survive `FuseTIR` and what
`passes/program/prim_funcs.py` does with the function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

BLOCKED_CONV2D = "blocked_conv2d"
"""Sums over input channels and taps; shapes are those of `blocked_operators.py`, as of the next two."""
BLOCKED_DEPTHWISE = "blocked_depthwise"
BLOCKED_GROUPED_CONV2D = "blocked_grouped_conv2d"
CUMULATIVE_SUM = "cumulative_sum"
"""Prefix sums; with `axis`, `exclusive` and the elements of a `block`, which is summed by itself."""
TOP_K = "top_k"
"""Indices of the first elements of an axis in sorted order; with `axis` and `largest`."""


class Pattern(IntEnum):
    """How an operator's loops relate to its inputs, as TVM's `AnnotateTIROpPattern` numbers it."""

    ELEMENTWISE = 0
    BROADCAST = 1
    INJECTIVE = 2
    REDUCTION = 3
    OUT_ELEMENTWISE_FUSABLE = 4
    TUPLE = 7
    OPAQUE = 8


@dataclass(frozen=True, slots=True)
class ConvAnnotation:
    """A convolution, or a gradient of one; tuples have an element for each spatial axis."""

    operator: str
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    """In front of each axis, then behind each axis."""
    dilation: tuple[int, ...]
    groups: int = 1
    group_outputs: int = 0
    """Output channels of a group where the last one may have fewer; 0: all have as many."""

    def attributes(self) -> dict[str, object]:
        """The `attrs` of `te.compute`, which become annotations of the block."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}


def read_annotation(annotations: Mapping[str, Any], *operators: str) -> ConvAnnotation | None:
    """What a block is annotated with, if that is one of the operators; else None."""
    operator = str(annotations.get("operator", ""))
    if operator not in operators:
        return None
    strides, padding, dilation = (
        tuple(int(v) for v in annotations[key]) for key in ("strides", "padding", "dilation")
    )
    groups, group_outputs = int(annotations["groups"]), int(annotations.get("group_outputs", 0))
    return ConvAnnotation(operator, strides, padding, dilation, groups, group_outputs)
