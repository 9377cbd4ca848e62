"""What a session is told of other ranks, of which it knows nothing: who adds sums over them to its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hybridc.artifact.load import Artifact


class Collectives(Protocol):
    """Sums over the ranks of some outputs of an artifact, made while its other steps still run."""

    def added_to(self, artifact: Artifact) -> Artifact:
        """With steps of the network's lane in the chosen plan; the verifier checks it afterwards."""

    def make(self, function: str, arrays: Sequence[np.ndarray]) -> None:
        """Called by the lane's thread: the arrays of one step, in the order of its function's parameters.

        What it raises ends the run.
        """

    def take_failure(self) -> BaseException | None:
        """What `make` raised in the last run, told once."""
