"""A harness whose inputs end as inputs should not, for the test of the driver."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from tests.fuzz.driver import Harness, Outcome, Verdict


def check(random: Random, folder: Path) -> Verdict:
    """A third is right, a third raises, a third ends the process."""
    match random.randrange(3):
        case 0:
            return Verdict(Outcome.RIGHT)
        case 1:
            raise ValueError(folder)
    os.abort()


HARNESS = Harness("dying", check, seconds=5)
