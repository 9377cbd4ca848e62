"""Machine profiles for tests."""

from __future__ import annotations

from pathlib import Path

EAGER_GPU = Path(__file__).parents[1] / "data" / "eager_gpu.json"
"""With it a plan leaves nothing to the CPU that fits the GPU, so that its code is what is tested."""

SLOW_MEMORIES = Path(__file__).parents[1] / "data" / "slow_memories.json"
"""With it reading weights is all that takes time: both devices together take two thirds of what the GPU
takes."""
