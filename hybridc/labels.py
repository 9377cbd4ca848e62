"""Labels: integers that a loss looks up among its classes, checked when they are fed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridc.errors import UsageError

LOSS_NODES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
"""ONNX's operators that take labels, as their second operand."""
PADDING_LABEL = -(2**31)
"""Of the padding behind the labels of a batch that is not whole, where the loss ignores no other."""


@dataclass(frozen=True, slots=True)
class Labels:
    """What a loss takes as a label: 0 to `classes - 1`, and `ignored`."""

    classes: int
    ignored: int | None = None
    """The label of what the loss leaves out, whatever its value; None: there is none."""

    def wrong(self, array: np.ndarray) -> np.ndarray:
        """Where an array of integers has something else: a mask, or an empty array if nowhere."""
        if not array.size or (array.min() >= 0 and array.max() < self.classes):
            return np.zeros(0, bool)  # without a mask, which most batches do not need
        mask = (array < 0) | (array >= self.classes)
        return mask if self.ignored is None else mask & (array != self.ignored)


def check_labels(name: str, array: np.ndarray, labels: tuple[Labels, ...], where: str = "") -> None:
    """Raises UsageError HC581 for the first value of an input that one of its losses has no class for."""
    for each in labels:
        wrong = each.wrong(array)
        if wrong.any():
            position = np.unravel_index(int(wrong.argmax()), wrong.shape)
            place = f" at {[int(i) for i in position]}" if position else ""
            what = f"input {name!r} has the label {int(array[position])}{place}, but its loss has"
            ignored = "" if each.ignored is None else f", or {each.ignored}, which is ignored"
            raise UsageError(
                "HC581",
                f"{what} {each.classes} classes",
                where=where,
                remedy=f"labels are 0 to {each.classes - 1}{ignored}",
            )
