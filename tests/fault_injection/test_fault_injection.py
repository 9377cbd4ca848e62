"""A call of CUDA or of the system fails: the error names what for, nothing is kept, the session goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridc import emulator
from hybridc.errors import DeviceError
from hybridc.runtime import load
from tests.fault_injection.faults import Fault, injected
from tests.fault_injection.networks import compiled_network, small_networks
from tests.fault_injection.trial import Network, all_faults, try_fault

SAMPLE = 40
"""Faults of each network that the fast suite draws, besides one of each function."""


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Network]]:
    yield {each.name: each for each in small_networks(tmp_path_factory.mktemp("faults"))}
    emulator.reset()


@pytest.mark.parametrize("name", ["both_devices", "streamed", "slots"])
def test_drawn_faults_leave_no_leak_and_no_wrong_result(networks: dict[str, Network], name: str) -> None:
    faults = all_faults(networks[name])
    first = {fault.function: fault for fault in reversed(faults)}
    drawn = random.Random(7).sample(faults, SAMPLE)
    for fault in dict.fromkeys([*first.values(), *drawn]):
        try_fault(networks[name], fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both_devices", "streamed", "slots"])
def test_every_fault(networks: dict[str, Network], name: str) -> None:
    for fault in all_faults(networks[name]):
        try_fault(networks[name], fault)


@pytest.mark.slow
def test_every_fault_of_a_compiled_network(tmp_path: Path) -> None:
    network = compiled_network(tmp_path)
    for fault in all_faults(network):
        try_fault(network, fault)


@pytest.mark.parametrize(
    ("name", "fault", "place"),
    [
        ("both_devices", Fault("cuLaunchKernelEx", 1), "kernel 'k2' on the GPU"),
        ("both_devices", Fault("cudaMemcpyAsync", 0), "weight 'w', which is copied to the GPU once"),
        ("streamed", Fault("cudaHostAlloc", 1), "the staging of streamed weights, of 512 pinned bytes"),
        ("streamed", Fault("cudaEventCreateWithFlags", 0), "kernel 'k0' on the CPU"),
    ],
)
def test_error_names_kernel_tensor_or_memory(
    networks: dict[str, Network], name: str, fault: Fault, place: str
) -> None:
    [message] = try_fault(networks[name], fault).messages
    assert f"--> {place}" in message


def test_without_graphs_runs_launch_kernels_one_by_one(networks: dict[str, Network]) -> None:
    for function in ("cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"):
        assert try_fault(networks["both_devices"], Fault(function, 0)).codes == ()


def test_a_lost_device_refuses_every_later_run(networks: dict[str, Network]) -> None:
    network = networks["both_devices"]
    with injected(Fault("cuLaunchKernelEx", 0, is_lasting=True)), load(network.path) as session:
        for _ in range(3):
            with pytest.raises(DeviceError) as caught:
                session.run(None, dict(network.feeds))
            assert caught.value.code == "HC407"
    emulator.reset()
    try_fault(network, Fault("cudaMemGetInfo", 0))
