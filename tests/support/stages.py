"""The compiler's stages with one of a test's own among them."""

from __future__ import annotations

from typing import Any

from hybridc.passes import pipeline
from hybridc.passes.sequence import Stage, StageSequence


def stages_with(stage: Stage[Any, Any], *, after: str) -> StageSequence[Any, Any]:
    """`STAGES` with a further stage after the one of this name, whose type it keeps."""
    stages = pipeline.STAGES.stages
    end = [one.name for one in stages].index(after) + 1
    return StageSequence((*stages[:end], stage, *stages[end:]))
