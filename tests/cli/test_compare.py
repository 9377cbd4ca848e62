"""Comparison with ONNX Runtime: errors measured right, and pass or fail told by the exit code."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hybridc.cli.compare import _default_tolerance
from hybridc.cli.support.child import ChildError, Ran, run_artifact
from hybridc.cli.support.reference import deviation
from hybridc.errors import UsageError

MIB = 1024**2


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    """y = max(x, 0) with an open first dimension."""
    x = onnx.helper.make_tensor_value_info("in=x", onnx.TensorProto.FLOAT, ["N", 3])
    y = onnx.helper.make_tensor_value_info("../y/0", onnx.TensorProto.FLOAT, ["N", 3])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["in=x"], ["../y/0"])], "g", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "relu.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def ran(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs that compute the right result plus `error`, holding `allocated` bytes; they note the GPU's."""
    behaviour: dict[str, Any] = {"error": 0.0, "allocated": 512, "emulated": [], "budgets": []}

    def pretend(
        artifact: Path,
        feeds: dict[str, np.ndarray],
        folder: Path,
        emulated_bytes: int | None,
        threads: int | None,
        budget_bytes: int | None,
    ) -> Ran:
        behaviour["emulated"].append(emulated_bytes)
        behaviour["budgets"].append(budget_bytes)
        result = np.maximum(feeds["in=x"], 0) + np.float32(behaviour["error"])
        return Ran({"../y/0": result}, 0.25, behaviour["allocated"])

    monkeypatch.setattr("hybridc.cli.support.child.run_artifact", pretend)
    return behaviour


OPTIONS = ("--target", "cuda+avx2", "--dim", "N=2", "--emulate-gpu")


def test_compare_passes_at_every_budget(cli: Any, fakes: Any, ran: dict[str, Any], relu: Path) -> None:
    outcome = cli("compare", relu, *OPTIONS, "--gpu-memory", "2MiB,50%,1MiB,2MiB")
    assert outcome.code == 0
    assert outcome.out.count("PASS") == 3
    assert ran["emulated"] == [4 * MIB, 2 * MIB, MIB], "the emulated GPU has exactly the budget"
    assert ran["budgets"] == ran["emulated"]
    assert len(fakes.options) == 1, "one artifact has all plans"


def test_compare_json(cli: Any, ran: dict[str, Any], relu: Path) -> None:
    data = cli("compare", relu, *OPTIONS, "--gpu-memory", "2MiB", "--json").json()
    assert data["passed"] is True and data["emulated_gpu"] is True
    (row,) = data["comparisons"]
    assert (row["budget_bytes"], row["allocated_bytes"], row["max_abs_error"]) == (2 * MIB, 512, 0.0)


def test_compare_without_a_budget_gives_the_gpu_what_the_plan_needs(
    cli: Any, ran: dict[str, Any], relu: Path
) -> None:
    assert cli("compare", relu, *OPTIONS).code == 0
    assert (ran["emulated"], ran["budgets"]) == ([512], [None])


def test_compare_fails_on_a_wrong_result(cli: Any, ran: dict[str, Any], relu: Path) -> None:
    ran["error"] = 0.01
    outcome = cli("compare", relu, *OPTIONS, "--gpu-memory", "2MiB", "--json")
    assert outcome.code == 1
    assert outcome.json()["passed"] is False
    assert outcome.err.startswith("error[HC910]: at a budget of 2.00 MiB output '../y/0' is off by ")
    assert cli("compare", relu, *OPTIONS, "--tolerance", "0.1").code == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-2), ("float32", 1e-4), ("int16", 1e-4)])
def test_default_tolerance_depends_on_how_outputs_are_rounded(dtype: str, tolerance: float) -> None:
    assert _default_tolerance({"a": np.zeros(1, np.float64), "b": np.zeros(1, dtype)}) == tolerance


def test_compare_fails_on_infinite_results_with_valid_json(cli: Any, ran: dict[str, Any], relu: Path) -> None:
    ran["error"] = float("nan")
    outcome = cli("compare", relu, *OPTIONS, "--json")
    assert outcome.code == 1
    assert outcome.json()["comparisons"][0]["max_abs_error"] is None


def test_compare_fails_above_the_budget(cli: Any, ran: dict[str, Any], relu: Path) -> None:
    ran["allocated"] = 3 * MIB
    outcome = cli("compare", relu, *OPTIONS, "--gpu-memory", "2MiB")
    assert outcome.code == 1 and "error[HC911]" in outcome.err and "FAIL" in outcome.out


def test_compare_names_the_budget_at_which_a_run_failed(
    cli: Any, ran: dict[str, Any], relu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Ran:
        raise ChildError("error[HC407]: the device failed", 5)

    monkeypatch.setattr("hybridc.cli.support.child.run_artifact", fail)
    outcome = cli("compare", relu, *OPTIONS, "--gpu-memory", "2MiB")
    assert outcome.code == 5
    assert outcome.err == "error[HC407]: the device failed\n  = note: in the run at a budget of 2.00 MiB\n"


def test_compare_without_onnxruntime_says_so(
    cli: Any, ran: dict[str, Any], relu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    outcome = cli("compare", relu, *OPTIONS)
    assert outcome.code == 2 and "pip install onnxruntime" in outcome.err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--gpu-memory", "1MiB,x"], "error[HC510]"),
        (["--gpu-memory", "1MiB", "--tolerance", "nan"], "invalid tolerance"),
        (["--gpu-memory", "1MiB", "--target", "cuda+avx2"], "--dim N=1"),
    ],
)
def test_compare_refuses(cli: Any, ran: dict[str, Any], relu: Path, argv: list[str], text: str) -> None:
    outcome = cli("compare", relu, *argv, "--target", "cuda+avx2")
    assert outcome.code == 2 and text in outcome.err


def test_compare_refuses_what_onnxruntime_refuses(cli: Any, ran: dict[str, Any], model: Path) -> None:
    outcome = cli("compare", model, *OPTIONS)
    assert outcome.code == 2 and "onnxruntime cannot run this model" in outcome.err


def test_error_of_the_other_process_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="does not exist") as failure:
        run_artifact(tmp_path / "no.hyb", {"x=1": np.zeros(1)}, tmp_path, 1024, 1)
    assert failure.value.exit_code == UsageError.exit_code
    assert str(failure.value).startswith("error[HC530]")


def test_deviation_is_relative_to_the_largest_value() -> None:
    found = deviation("y", np.array([100.0, 1.5]), np.array([100.0, 1.0]))
    assert (found.max_abs, found.max_rel) == (0.5, 0.005)


def test_deviation_of_equal_nans_and_infinities_is_none() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert deviation("y", values, values).max_rel == 0.0


@pytest.mark.parametrize("actual", [[np.nan, 2.0], [np.inf, 2.0], [1.0], [[1.0, 2.0]]])
def test_deviation_of_a_new_nan_infinity_or_shape_is_infinite(actual: list[Any]) -> None:
    assert deviation("y", np.array(actual), np.array([1.0, 2.0])).max_rel == np.inf


def test_deviation_of_zeros_is_absolute_and_of_nothing_zero() -> None:
    assert deviation("y", np.array([0.25]), np.array([0.0])).max_rel == 0.25
    assert deviation("y", np.zeros((0, 3)), np.zeros((0, 3))).max_rel == 0.0


def test_deviation_of_booleans_and_integers() -> None:
    assert deviation("y", np.array([True]), np.array([False])).max_abs == 1.0
    assert deviation("y", np.array([7], np.uint8), np.array([9], np.uint8)).max_abs == 2.0
