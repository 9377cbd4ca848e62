"""Sums over ranks: values against float64 and MPI's own, bytes, and bf16 against PyTorch's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridc.machine import Network, load_machine, machine_from_json, machine_to_json
from hybridc.training.ranks.allreduce import from_bf16, to_bf16
from tests.training.ranks.conftest import finish, start

PROGRAM = Path(__file__).with_name("sums_of_ranks.py")
RANKS = 3


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("sums") / "report.json"
    code, _, told = finish(start(RANKS, PROGRAM, output))
    assert code == 0, told
    return json.loads(output.read_text())


def test_sums_are_those_of_float64_and_mpi_on_all_ranks(report: Any) -> None:
    assert report["error"] < 1e-6 > report["error_of_mpi"]
    assert report["names"] == ["a", "b", "c", "d"] and report["shapes_kept"]
    assert report["equal_on_ranks"] and report["equal_again"]


def test_bytes_sent_are_the_least_that_an_all_reduce_needs(report: Any) -> None:
    least = 2 * (RANKS - 1) / RANKS * report["parameter_bytes"]
    assert sum(report["sent_bytes"]) / RANKS == pytest.approx(least, rel=0.02)
    assert report["sent_bytes_of_bf16"] == pytest.approx(least / 2, rel=0.02)


def test_what_bf16_loses_of_a_sum_is_added_to_the_next(report: Any) -> None:
    assert report["bf16_equal_on_ranks"]
    assert 1e-3 < report["error_of_bf16"] < 0.1
    assert report["error_of_mean_of_bf16"] < report["error_of_bf16"] / 10


def test_measured_network_is_one_of_a_profile(report: Any) -> None:
    machine = replace(load_machine(), network=Network(**report["network"]))
    assert machine_from_json(machine_to_json(machine)) == machine
    assert "network" not in machine_to_json(load_machine())


def test_bf16_is_rounded_as_pytorch_does() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45], np.float32)
    values = np.concatenate([edges, bits.view(np.float32)])
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(from_bf16(to_bf16(values)), expected)
