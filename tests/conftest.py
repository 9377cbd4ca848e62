"""What every test shares: two threads, skips for missing hardware, and golden files."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# before anything imports TVM, which reads it once: by default it takes half the cores
os.environ.setdefault("TVM_NUM_THREADS", "2")
# some tests put faults into the compiler, whose results must not reach others; tests of the cache set it
os.environ["HYBRIDC_CACHE_SIZE"] = "0B"

from hybridc import emulator
from hybridc.targets import ISAS, missing_flags

# the fast suite draws the same examples every time; `make test-full` explores others
hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None)
hypothesis.settings.register_profile("exploring", deadline=None, print_blob=True)
hypothesis.settings.load_profile("seeded")

GOLDEN_FOLDER = Path(__file__).parent / "golden"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write the golden files anew")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("isa"):
        missing = missing_flags(ISAS[marker.args[0]])
        if missing:
            pytest.skip(f"this processor lacks {', '.join(missing)}")
    if item.get_closest_marker("gpu") is not None and not NVIDIA_DRIVER.exists():
        pytest.skip("no NVIDIA driver")


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is as in a pipe, whatever width the shell that runs the tests tells of."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def no_garbage_on_the_gpu() -> None:
    """Sessions that an earlier test's traceback held must not free their memory while this one counts."""
    if emulator.is_active() and emulator.statistics().used_bytes:
        gc.collect()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` holds `text` against tests/golden/NAME; `--renew-golden` writes it instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN_FOLDER / name
        if request.config.getoption("--renew-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        assert text == expected, f"{path} differs; if the change is meant: pytest --renew-golden"

    return check
