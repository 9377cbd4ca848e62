"""Parameters in parts, and whole again."""

from __future__ import annotations

import numpy as np
import pytest

from hybridc.passes.training.spec import TrainingSpec
from hybridc.passes.training.splits import SplitParameter, cut, joined, whole_names
from hybridc.training.artifact import StoredState, TrainingManifest

VALUES = {"a": np.arange(3.0), "w": np.arange(20.0).reshape(5, 4), "b": np.zeros(())}


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_join_to_what_was_cut(axis: int) -> None:
    splits = {"w": SplitParameter(axis, ("w0", "w1"), (3, VALUES["w"].shape[axis]))}
    parts = cut(VALUES, splits)
    assert list(parts) == ["a", "w0", "w1", "b"] and whole_names(splits) == {"w0": "w", "w1": "w"}
    assert parts["w0"].shape[axis] == 3 and parts["w0"].flags.c_contiguous
    again = joined(parts, splits)
    assert list(again) == list(VALUES)
    for name, value in VALUES.items():
        np.testing.assert_array_equal(again[name], value)
        assert not np.shares_memory(again[name], value)


def test_users_states_are_whole_and_without_sums() -> None:
    states = (
        StoredState("w0", "parameter", (4, 3), "float32"),
        StoredState("w1", "parameter", (4, 2), "float32"),
        StoredState("w0#sum", "sum", (4, 3), "float32"),
        StoredState("w1#sum", "sum", (4, 2), "float32"),
        StoredState("b", "parameter", (), "float32"),
    )
    splits = {"w": SplitParameter(1, ("w0", "w1"), (3, 5))}
    manifest = TrainingManifest(TrainingSpec(), "", "", "", (), (), "loss", {}, None, states, splits)
    found = {state.name: state.shape for state in manifest.whole_states}
    assert found == {"w": (4, 5), "b": ()}
