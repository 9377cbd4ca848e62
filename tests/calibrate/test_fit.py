"""Efficiencies out of times that a processor of known efficiencies would need."""

from __future__ import annotations

import pytest

from hybridc.calibrate.fit import Sample, efficiencies, sample


def test_shares_are_found_from_kernels_that_either_limit_bounds() -> None:
    kernels = [(100.0, 10.0), (1.0, 80.0), (60.0, 1.0), (3.0, 90.0)]
    found = efficiencies(Sample("conv2d", c, m, max(c / 0.5, m / 0.8)) for c, m in kernels)["conv2d"]
    assert found.compute == pytest.approx(0.5, rel=0.03)
    assert found.memory == pytest.approx(0.8, rel=0.03)


def test_a_limit_that_bounds_no_kernel_takes_after_the_other() -> None:
    found = efficiencies([Sample("pooling", 0.0, 30.0, 60.0)])["pooling"]
    assert found.memory == pytest.approx(0.5, rel=0.03)
    assert found.compute == pytest.approx(found.memory)


def test_families_are_apart_and_may_exceed_the_peak() -> None:
    found = efficiencies([Sample("winograd", 50.0, 1.0, 25.0), Sample("conv2d", 50.0, 1.0, 100.0)])
    assert list(found) == ["conv2d", "winograd"]
    assert found["winograd"].compute == pytest.approx(2.0, rel=0.03)
    assert found["conv2d"].compute == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize(("us", "own_us"), [(10.0, 7.0), (3.0, 0.3)])
def test_a_launch_is_no_part_of_the_time_but_leaves_some(us: float, own_us: float) -> None:
    made = sample("matmul", 10**6, 10**5, us, peak_gflops=100, bandwidth_gb_s=10, launch_us=3)
    assert made.family == "matmul"
    assert (made.compute_us, made.memory_us, made.measured_us) == pytest.approx((10, 10, own_us))
