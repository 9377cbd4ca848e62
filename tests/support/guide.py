"""The rules that docs/writing_a_schedule.md shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hybridc.schedules.rule import Rule

GUIDE = Path(__file__).parents[2] / "docs" / "writing_a_schedule.md"


def rule_of_guide(name: str) -> Rule:
    """The rule of the only example that defines `name`, executed as it stands."""
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (code,) = [example for example in examples if f"def {name}(" in example]
    names: dict[str, Any] = {"__name__": "guide"}
    exec(code, names)
    return names[name]
