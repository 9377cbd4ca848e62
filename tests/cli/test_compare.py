"""Comparison with ONNX Runtime: errors measured right, and pass or fail told by the exit code."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hybridc.cli.support.child import ChildError, Ran, run_artifact
from hybridc.cli.support.doubles import double_run, to_doubles
from hybridc.cli.support.tolerance import (
    FLOATS,
    HALVES,
    REDUCED,
    Tolerance,
    default_tolerance,
    deviation,
)
from hybridc.errors import UsageError
from tests.cli.conftest import variance

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
    outcome = cli("compare", relu, *OPTIONS, "--gpu-memory", "2MiB", "--json", "--quiet")
    assert outcome.code == 1
    assert outcome.json()["passed"] is False
    assert outcome.err.startswith("error[HC910]: at a budget of 2.00 MiB output '../y/0' is off by ")
    assert "onnxruntime is 0.00e+00 off in float64, hybridc 1.00e-02" in outcome.err
    [judgement] = outcome.json()["comparisons"][0]["judgements"]
    assert judgement["elements_off"] == judgement["elements"] == 6 and not judgement["passed"]
    assert cli("compare", relu, *OPTIONS, "--tolerance", "0.1").code == 0


def test_compare_bisect_names_the_first_node_that_is_off(cli: Any, ran: dict[str, Any], relu: Path) -> None:
    ran["error"] = 0.01
    outcome = cli("compare", relu, *OPTIONS, "--gpu-memory", "2MiB", "--bisect", "--quiet")
    assert outcome.code == 1 and outcome.err.startswith("error[HC910]: at a budget of 2.00 MiB")
    assert "The first to miss is node 'Relu_0' (Relu), output '../y/0' (2x3): off by 1.00e-02" in outcome.out
    found = cli("compare", relu, *OPTIONS, "--bisect", "--json", "--quiet").json()["first_miss"]
    assert (found["node"], found["shape"], found["elements_off"]) == ("Relu_0", [2, 3], 6)
    ran["error"] = 0.0
    assert cli("compare", relu, *OPTIONS, "--bisect", "--json").json()["first_miss"] is None


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [
        ("float16", "fp32", HALVES),
        ("float32", "fp32", FLOATS),
        ("int16", "fp32", FLOATS),
        ("float32", "bf16", REDUCED),
    ],
)
def test_default_tolerance_depends_on_how_outputs_are_rounded(
    dtype: str, precision: str, tolerance: Tolerance
) -> None:
    outputs = [np.zeros(1, np.float64), np.zeros(1, dtype)]
    assert default_tolerance(outputs, precision) == tolerance


def test_rtol_and_atol_are_those_of_numpy(cli: Any, ran: dict[str, Any], relu: Path) -> None:
    ran["error"] = 0.01
    for given, code in (
        (["--atol", "0.011"], 0),
        (["--atol", "0.009"], 1),
        (["--atol", "0.009", "--rtol", "1"], 1),  # elements that are zero have no relative error
        (["--rtol", "0", "--atol", "0.0101"], 0),
    ):
        assert cli("compare", relu, *OPTIONS, *given).code == code, given
    data = cli("compare", relu, *OPTIONS, "--rtol", "0.5", "--atol", "0.25", "--json").json()
    assert (data["rtol"], data["atol"], data["tolerance"]) == (0.5, {"../y/0": 0.25}, None)
    assert data["comparisons"][0]["elements_off"] == 0
    outcome = cli("compare", relu, *OPTIONS, "--tolerance", "0.1", "--rtol", "0.1")
    assert outcome.code == 2 and "error[HC500]" in outcome.err


@pytest.mark.parametrize("tolerance", [Tolerance(0.1, 0.05), Tolerance(0.0, 0.0), Tolerance(0.5, 0.0)])
def test_elements_that_miss_are_those_of_numpy(tolerance: Tolerance) -> None:
    random = np.random.default_rng(0)
    expected = random.standard_normal(1000)
    found = expected + 0.1 * random.standard_normal(1000)
    misses = ~np.isclose(found, expected, rtol=tolerance.rtol, atol=tolerance.atol or 0.0)
    assert deviation("y", found, expected, tolerance).elements_off == misses.sum()


def test_outputs_next_to_nothing_have_an_absolute_tolerance() -> None:
    """What is left of terms of about one."""
    found = deviation("y", np.array([1.2e-7, 0.0]), np.array([1e-8, 6e-8]))
    assert found.max_rel > 1 and found.elements_off == 0
    assert deviation("y", np.array([1.2e-5]), np.array([1e-8])).elements_off == 1


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


# ---------------------------------------------------------------------------------- float64 decides


@pytest.fixture
def other_order(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Runs that sum up the variance's terms one after the other in float32, and are `wrong` besides."""
    behaviour = {"wrong": 0.0}

    def pretend(artifact: Path, feeds: dict[str, np.ndarray], *rest: Any) -> Ran:
        shifted = feeds["x"] + np.float32(300)
        sums = [np.cumsum(terms, axis=1, dtype=np.float32)[:, -1] for terms in (shifted**2, shifted)]
        of_square, of_x = (total / np.float32(64) for total in sums)
        return Ran({"y": of_square - of_x * of_x + np.float32(behaviour["wrong"])}, 0.25, 512)

    monkeypatch.setattr("hybridc.cli.support.child.run_artifact", pretend)
    return behaviour


def test_formula_that_cancels_passes_if_onnxruntime_is_as_far_off(
    cli: Any, other_order: dict[str, float], tmp_path: Path
) -> None:
    onnx.save(variance(), tmp_path / "variance.onnx")
    outcome = cli("compare", tmp_path / "variance.onnx", "--target", "avx2")
    assert outcome.code == 0 and "PASS (float64)" in outcome.out
    assert "elements miss the tolerance; onnxruntime is " in outcome.out and "(evaluated by " in outcome.out
    data = cli("compare", tmp_path / "variance.onnx", "--target", "avx2", "--json").json()
    [judgement] = data["comparisons"][0]["judgements"]
    assert 1e-4 < judgement["onnxruntime_error"] < 0.1 and judgement["passed"]
    assert judgement["hybridc_error"] <= 4 * judgement["onnxruntime_error"]
    other_order["wrong"] = 1.0
    outcome = cli("compare", tmp_path / "variance.onnx", "--target", "avx2")
    assert outcome.code == 1 and "error[HC910]" in outcome.err and "FAIL (float64)" in outcome.out


def test_evaluation_that_is_far_from_both_results_is_not_believed(
    cli: Any, ran: dict[str, Any], relu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridc.cli.support.doubles import Doubles

    def nonsense(model: Path, feeds: dict[str, np.ndarray], outputs: Any) -> Doubles:
        return Doubles({name: np.full((2, 3), 100.0) for name in outputs}, "nonsense")

    monkeypatch.setattr("hybridc.cli.support.doubles.double_run", nonsense)
    ran["error"] = 0.01
    outcome = cli("compare", relu, *OPTIONS)
    assert outcome.code == 1 and "which is not credible" in outcome.err


def test_model_that_nothing_evaluates_in_float64_fails_with_the_reason(
    cli: Any, ran: dict[str, Any], relu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridc.cli.support.doubles.LIMIT_SECONDS", 0.01)
    ran["error"] = 0.01
    outcome = cli("compare", relu, *OPTIONS)
    assert outcome.code == 1
    assert "there is no evaluation in float64: it takes more than 0.01 s" in outcome.err


def convolution() -> onnx.ModelProto:
    """With constants of every kind, and a kernel that ONNX Runtime has for float32 only."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 2, 6, 6])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 3, 6, 6])
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        onnx.helper.make_node("Constant", [], ["third"], value_float=1 / 3),
        onnx.helper.make_node("Mul", ["c", "third"], ["scaled"]),
        onnx.helper.make_node("Shape", ["scaled"], ["shape"]),
        onnx.helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        onnx.helper.make_node("Cast", ["scaled"], ["half"], to=onnx.TensorProto.FLOAT16),
        onnx.helper.make_node("Cast", ["half"], ["single"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Add", ["single", "zeros"], ["y"]),
    ]
    weight = np.random.default_rng(0).standard_normal((3, 2, 3, 3)).astype(np.float32)
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], [onnx.numpy_helper.from_array(weight, "w")])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)


def test_every_float_of_a_model_becomes_a_double() -> None:
    model = convolution()
    to_doubles(model)
    onnx.checker.check_model(model, full_check=True)
    assert model.graph.initializer[0].data_type == onnx.TensorProto.DOUBLE
    assert model.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.DOUBLE


def test_doubles_are_more_exact_than_float32(tmp_path: Path) -> None:
    model = convolution()
    onnx.save(model, tmp_path / "conv.onnx")
    x = np.random.default_rng(1).standard_normal((1, 2, 6, 6)).astype(np.float32)
    found = double_run(tmp_path / "conv.onnx", {"x": x}, ["y"])
    assert found.outputs is not None and found.outputs["y"].dtype == np.float64, found.by
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0]).astype(np.float64)
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    expected = np.einsum("ncyxij,ocij->noyx", windows, weight) * np.float32(1 / 3)
    np.testing.assert_allclose(found.outputs["y"], expected, rtol=1e-12, atol=1e-12)
