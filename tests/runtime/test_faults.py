"""Kernels that check their values: a run that finds one outside its limits fails, and the next one runs."""

# mypy: disable-error-code="valid-type"
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

from hybridc import emulator
from hybridc.errors import UsageError
from hybridc.ir import Check, CheckKind
from hybridc.ir.bind import BindingError, FaultRows, Parameter, bind
from hybridc.ir.graph import graph_from_json, graph_to_json
from hybridc.runtime import load
from hybridc.schedules.rule import Scheduled
from tests.support.artifacts import CPU, GPU, SHAPE, Model, hybrid_model

INDEX = Check("node_3", "GatherND", CheckKind.INDEX, -3, 2)
DIVISOR = Check("node_4", "Div", CheckKind.DIVISOR, 0, 0)


# a copy whose second check fails where an element is 7
@T.prim_func(s_tir=True)
def no_seven(
    x: T.Buffer((4, 8), "float32"), y: T.Buffer((4, 8), "float32"), faults: T.Buffer((2, 2), "int64")
) -> None:
    T.func_attr({"tirx.noalias": True})
    for i, j in T.grid(4, 8):
        y[i, j] = x[i, j]
        if x[i, j] == T.float32(7):
            faults[1, 0] = T.int64(1)
            faults[1, 1] = T.int64(0)


# -x, with a check that fails where an element is 5
@T.prim_func(s_tir=True)
def no_five(
    x: T.Buffer((4, 8), "float32"), y: T.Buffer((4, 8), "float32"), faults: T.Buffer((1, 2), "int64")
) -> None:
    T.func_attr({"tirx.noalias": True})
    for t in T.thread_binding(32, thread="threadIdx.x"):
        y[t // 8, t % 8] = -x[t // 8, t % 8]
        if x[t // 8, t % 8] == T.float32(5):
            faults[0, 0] = T.int64(1)
            faults[0, 1] = T.int64(5)


def checking_model() -> Model:
    """The hybrid model where the CPU's kernel has two checks and the GPU's last kernel one."""
    model = hybrid_model()
    kernels = tuple(
        replace(k, checks={"k1": (INDEX, DIVISOR), "k3": (INDEX,)}.get(k.name, ()))
        for k in model.graph.kernels
    )
    functions = {
        **model.functions,
        ("relu", CPU): Scheduled(no_seven, "as_is"),
        ("negate", GPU): Scheduled(no_five, "as_is"),
    }
    graph = replace(model.graph, kernels=kernels)
    return replace(model, graph=graph, functions=functions, weights={"w": np.eye(8, dtype=np.float32)})


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checking_model().write(tmp_path_factory.mktemp("checking") / "model.hyb")


def feed(value: float) -> dict[str, np.ndarray]:
    """All ones but for one element; the CPU checks what is fed, the GPU twice that."""
    x = np.ones(SHAPE, np.float32)
    x[2, 3] = value
    return {"the/x": x}


@pytest.mark.parametrize("options", [{}, {"guard_tensors": True}, {"lazy_streams": True}])
def test_failed_check_names_node_and_value_and_the_session_runs_again(
    artifact: Path, options: dict[str, Any]
) -> None:
    emulator.start(1 << 20, **options)
    with load(artifact) as session:
        for value, message in (
            (7, "Div 'node_4': the divisor is 0"),
            (2.5, r"GatherND 'node_3': index 5 is outside of \[-3, 2\]"),
        ):
            with pytest.raises(UsageError, match=message) as caught:
                session.run(None, feed(value))
            assert caught.value.code == "HC560"
            (y,) = session.run(None, feed(3))
            np.testing.assert_array_equal(y, -2 * feed(3)["the/x"])
    emulator.reset()


def test_each_kernel_has_rows_of_its_own() -> None:
    binding = checking_model().lower().plans[0]
    rows = [o for step in binding.steps for o in step.operands if isinstance(o, FaultRows)]
    assert rows == [FaultRows(CPU, 0, (2, 2)), FaultRows(GPU, 2, (1, 2))]
    assert binding.checks == (INDEX, DIVISOR, INDEX)


def test_function_without_a_place_for_faults_is_refused() -> None:
    model = checking_model()
    signatures = dict(model.lower().signatures)
    *arrays, _ = signatures["relu", CPU]
    for wrong in ([], [Parameter((1, 2), "int64")], [Parameter((2, 2), "int32")]):
        signatures["relu", CPU] = (*arrays, *wrong)
        with pytest.raises(BindingError):
            bind(model.graph, model.plan, signatures)


def test_checks_survive_json() -> None:
    graph = checking_model().graph
    assert graph_from_json(json.loads(json.dumps(graph_to_json(graph)))) == graph
