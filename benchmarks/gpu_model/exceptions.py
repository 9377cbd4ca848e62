"""Thresholds of gates.py that a rule's kernels are known to miss: what they reach at worst, and why."""

from __future__ import annotations

from collections.abc import Mapping

_FEW_TILES = (
    "at batch 1 late layers have fewer tiles than two for each multiprocessor; smaller tiles cost more"
)
_WINDOWS = (
    "windows of a 3x3 convolution begin at any column of a row, so the input is loaded element by element"
)
_BYTES = (
    "in planes elements lie along the rows of an image, as those of a model's input do; tensor cores take "
    "them along the channels: a thread loads words of four bytes, or single elements of a window"
)
EXCEPTIONS: Mapping[tuple[str, str], tuple[float, str]] = {
    ("attention", "multiply_adds_per_shared_load"): (
        3.5,
        "4x4 scores a thread: larger tiles would leave too few blocks for the heads of a small batch",
    ),
    ("attention", "filled"): (0, "12 heads of 128 queries make 96 blocks of 16 queries"),
    ("conv2d", "local_bytes"): (
        32,
        "of ResNet-50's kernels one keeps eight of 80 registers in local memory on sm_75, where a slice of "
        "16 steps takes 36 registers on its way, and one two of 128 on sm_86",
    ),
    ("conv2d", "wide_loads"): (0.75, _WINDOWS),
    ("conv2d", "filled"): (0.5, _FEW_TILES),
    ("few_rows", "filled"): (
        0,
        "bound by memory, of which a block for each multiprocessor has enough loads on their way; "
        "a second launch to add up shares of the depth would take longer than it saves",
    ),
    ("matmul", "filled"): (0.75, _FEW_TILES),
    ("reduction", "sectors"): (
        1.8,
        "pooling of stride 2 reads every other element at a time; its next access finds the rest in L1",
    ),
    ("tensor_core_attention", "filled"): (0, "12 heads of 128 queries make 48 blocks of 32 queries"),
    ("tensor_core_attention", "wide_loads"): (
        0.75,
        "of 128 keys there is one tile, and queries are loaded by 32 bits, as fragments have them",
    ),
    ("tensor_core_attention", "sectors"): (
        1.4,
        "four lanes load half a sector of a query at a time; their next access finds the rest in L1",
    ),
    ("tensor_core_conv", "filled"): (0.45, _FEW_TILES),
    ("tensor_core_conv", "wide_loads"): (0.75, _BYTES),
    ("tensor_core_matmul", "filled"): (0.25, _FEW_TILES),
    ("tensor_core_winograd", "filled"): (0.6, _FEW_TILES),
    ("tensor_core_winograd", "sectors"): (
        1.5,
        "tiles of 4x4 inputs overlap by two columns, of which a lane loads those beside its own four apart; "
        "where lines do not begin at multiples of four elements, each element is loaded by itself",
    ),
    ("tensor_core_winograd", "wide_loads"): (0.7, _WINDOWS),
    ("winograd", "wide_loads"): (0, _WINDOWS),
    ("winograd", "filled"): (0.75, _FEW_TILES),
    ("winograd", "sectors"): (1.5, "tiles of 4x4 inputs overlap by two columns"),
}
"""By rule and gate: the threshold that holds in place of the gate's, and the reason."""
