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
hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None, max_examples=40)
hypothesis.settings.register_profile("exploring", deadline=None, print_blob=True)
hypothesis.settings.load_profile("seeded")

GOLDEN_FOLDER = Path(__file__).parent / "golden"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NO_ISA, NO_DRIVER = "this processor lacks", "no NVIDIA driver"
"""Why a test is skipped that no package would help."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write the golden files anew")
    notes = "write the names of tests, and of files, that are skipped for want of anything but hardware"
    parser.addoption("--note-skips", type=Path, metavar="FILE", help=notes)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--note-skips")
    if path is not None and not hasattr(config, "workerinput"):  # a worker's reports come to the controller
        config.pluginmanager.register(SkipNotes(path))


class SkipNotes:
    """What a run with more packages installed has to run again: `.ci/run` asks for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped: set[str] = set()
        """Tests, and files of which none was collected."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped and not any(reason in str(report.longrepr) for reason in (NO_ISA, NO_DRIVER)):
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text("".join(f"{each}\n" for each in sorted(self.skipped)), encoding="utf-8")


def pytest_collection_finish() -> None:
    """What modules and thousands of tests hold lives as long as the process: no collection walks it."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("isa"):
        missing = missing_flags(ISAS[marker.args[0]])
        if missing:
            pytest.skip(f"{NO_ISA} {', '.join(missing)}")
    if item.get_closest_marker("gpu") is not None and not NVIDIA_DRIVER.exists():
        pytest.skip(NO_DRIVER)


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
