"""Results as the benchmarks wrote them."""

from __future__ import annotations

import json
from typing import Any

from common import RESULTS


def read(name: str) -> Any:
    """The record `benchmarks/results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())
