"""What hybridc makes of a file that a tool has written, beside what onnxruntime makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import hybridc
from hybridc.errors import HybridcError
from tests.support.exact_reference import exact_session
from tests.variants.tools import TOOLS, fed, limit

AGREES, DIFFERS, REFUSED, FAILED = "agrees", "differs", "refused", "failed"
NOT_MADE = "not made"
"""The tool fails, or makes what onnxruntime, too, holds for no model."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of a network through a tool."""

    network: str
    tool: str
    outcome: str
    reason: str = ""
    error: float | None = None
    """The largest difference, as a fraction of the largest result."""


def judge(network: str, tool: str, original: onnx.ModelProto, folder: Path, target: str = "avx2") -> Verdict:
    """Make the file, compile it, and run both."""
    given = onnx.ModelProto()
    given.CopyFrom(original)
    try:
        model = TOOLS[tool](given, folder)
    except Exception as error:  # of the tool's own
        return Verdict(network, tool, NOT_MADE, f"{type(error).__name__}: {str(error)[:200]}")
    feeds = fed(model, 11)
    wanted = _reference(model, original, feeds)
    if wanted is None:
        return Verdict(network, tool, NOT_MADE, "onnxruntime refuses it")
    try:
        found = _compiled(model, feeds, folder, target)
    except HybridcError as error:
        outcome = FAILED if error.code in ("HC900", "HC115") else REFUSED
        return Verdict(network, tool, outcome, f"{error.code} {error.what}")
    except Exception as error:  # a fault, which a table is to show
        return Verdict(network, tool, FAILED, f"{type(error).__name__}: {str(error)[:200]}")
    apart = max(_distance(a, b) for a, b in zip(found, wanted, strict=True))
    return Verdict(network, tool, AGREES if apart <= limit(network, tool) else DIFFERS, error=apart)


def _reference(
    model: onnx.ModelProto, original: onnx.ModelProto, feeds: dict[str, np.ndarray]
) -> Sequence[np.ndarray] | None:
    """Of the model as it is; of the original one where a tool writes operators for a GPU only."""
    try:
        return exact_session(model).run(None, feeds)
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        return exact_session(original).run(None, feeds)
    except Exception:  # invalid graphs, of several classes
        return None


def _compiled(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], folder: Path, target: str
) -> Sequence[np.ndarray]:
    hybridc.compile(model, folder / "m.hyb", target=target, plan_seconds=0.05)
    with hybridc.load(folder / "m.hyb") as session:
        return session.run(None, feeds)


def _distance(found: np.ndarray, wanted: np.ndarray) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    exact = wanted.astype(np.float64)
    return float(np.abs(found - exact).max(initial=0.0) / max(np.abs(exact).max(initial=0.0), 1e-30))
