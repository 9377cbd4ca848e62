"""Machine profiles for tests."""

from __future__ import annotations

from pathlib import Path

EAGER_GPU = Path(__file__).parents[1] / "data" / "eager_gpu.json"
"""With it a plan leaves nothing to the CPU that fits the GPU, so that its code is what is tested."""
