"""Labels are checked against the classes of their losses."""

from __future__ import annotations

import numpy as np
import pytest

from hybridc.errors import UsageError
from hybridc.labels import Labels, check_labels


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_labels_in_range_pass(dtype: str) -> None:
    check_labels("y", np.arange(10).astype(dtype).reshape(2, 5), (Labels(10),))
    check_labels("y", np.zeros((0, 3), dtype), (Labels(10),))
    check_labels("y", np.full((), 9, dtype), (Labels(10), Labels(11)))


def test_ignored_label_passes_wherever_it_lies() -> None:
    check_labels("y", np.array([3, -100, 0]), (Labels(4, -100),))
    check_labels("y", np.array([3, 255, 0]), (Labels(4, 255),))
    check_labels("y", np.array([3, 2, 0]), (Labels(4, 2),))


@pytest.mark.parametrize(
    ("values", "labels", "what"),
    [
        ([0, 10, 11], (Labels(10),), "label 10 at [1], but its loss has 10 classes"),
        ([[0, 1], [10**6, -1]], (Labels(10),), "label 1000000 at [1, 0],"),
        ([-100, -1], (Labels(10, -100),), "label -1 at [1],"),
        (-1, (Labels(10),), "label -1, but"),
        ([0, 7], (Labels(10), Labels(7)), "label 7 at [1], but its loss has 7 classes"),
    ],
)
def test_first_label_without_a_class_is_named(values: object, labels: tuple[Labels, ...], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_labels("the labels", np.array(values), labels, "train.npz")
    assert caught.value.code == "HC581" and what in caught.value.what
    assert "input 'the labels'" in caught.value.what and caught.value.where == "train.npz"
    assert ("-100, which is ignored" in caught.value.remedy) == (labels[0].ignored is not None)
