"""The registry of gradient rules against what the frontend imports."""

from __future__ import annotations

import inspect
import re

from tvm.relax.frontend.onnx import onnx_frontend

import hybridc.passes.training.rules  # noqa: F401
from hybridc.frontend import converters
from hybridc.passes.training.gradients import FORMS, GRADIENTS

WITHOUT = {
    "integers, booleans and shapes": """
        argmax argmin bitwise_and bitwise_not bitwise_or bitwise_xor equal floor_divide greater greater_equal
        isfinite isinf isnan left_shift less less_equal logical_and logical_not logical_or logical_xor nonzero
        not_equal
        one_hot right_shift shape_of shape_to_tensor size tensor_to_shape unique""",
    "results that depend on no values": "arange full zeros",
    "rounded to integers": "quantize dequantize",
    "results whose shape depends on data": "dynamic_strided_slice",
    "detection, which chooses boxes": "vision.all_class_non_max_suppression",
    "made by operators of com.microsoft only": "nn.attention",
}
"""Operators of the importer that have no gradient, and why."""


def _imported() -> set[str]:
    """Names of the Relax operators that converters make."""
    sources = inspect.getsource(onnx_frontend) + inspect.getsource(converters)
    return set(re.findall(r"relax\.op\.((?:nn\.|image\.|vision\.)?[a-z_0-9]+)\b(?!\.)", sources)) - {"nn"}


def test_every_imported_operator_has_a_gradient_or_a_reason() -> None:
    without = {name for names in WITHOUT.values() for name in names.split()}
    known = set(GRADIENTS) | set(FORMS)
    assert _imported() - known - without == set()
    assert not without & known


def test_reasons_are_given_for_what_is_imported_only() -> None:
    assert {name for names in WITHOUT.values() for name in names.split()} - _imported() == set()
