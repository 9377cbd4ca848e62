"""Thresholds of gates.py that a rule's kernels are known to miss: what they reach at worst, and why."""

from __future__ import annotations

from collections.abc import Mapping

_FEW_TILES = (
    "at batch 1 late layers have fewer tiles than two for each multiprocessor; smaller tiles cost more"
)
_WINDOWS = (
    "windows of a 3x3 convolution begin at any column of a row, so the input is loaded element by element"
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
    ("tensor_core_matmul", "filled"): (0.4, _FEW_TILES),
    ("transpose", "bank_conflicts"): (
        1.13,
        "columns of a tile of 16-bit floats lie in half of the banks; memory is what such kernels wait for",
    ),
    ("winograd", "wide_loads"): (0, _WINDOWS),
    ("winograd", "filled"): (0.75, _FEW_TILES),
    ("winograd", "sectors"): (1.5, "tiles of 4x4 inputs overlap by two columns"),
}
"""By rule and gate: the threshold that holds in place of the gate's, and the reason."""
