"""What the runtime of bundles decides for itself is what a session of Python decides."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridc.bundle.build import NATIVE_FOLDER
from hybridc.errors import DeviceError
from hybridc.runtime.staging import choose_staging
from hybridc.targets import ISAS, cpu_flags, runs_on

MIB = 1 << 20
Ask = Callable[[list[str]], list[str]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What the functions of C++ answer to lines."""
    program = tmp_path_factory.mktemp("native") / "parts"
    source = Path(__file__).with_name("native_parts.cc")
    subprocess.run(["g++", "-std=c++20", f"-I{NATIVE_FOLDER}", str(source), "-o", str(program)], check=True)

    def asked(lines: list[str]) -> list[str]:
        given = "".join(f"{line}\n" for line in lines)
        done = subprocess.run([str(program)], input=given, capture_output=True, text=True, check=True)
        return [line.strip() for line in done.stdout.splitlines()]

    return asked


def test_flags_of_the_processor_are_those_that_linux_tells(ask: Ask) -> None:
    names = sorted({flag for isa in ISAS.values() for flag in isa.cpu_flags})
    assert ask([" ".join(["flags", *names, "avx9"])]) == [
        " ".join([*(name for name in names if name not in cpu_flags()), "avx9"])
    ]


def test_the_same_gpus_run_code_for_the_same_architectures(ask: Ask) -> None:
    lists: tuple[list[str], ...] = (
        ["sm_75"],
        ["sm_75", "sm_80", "sm_90"],
        ["sm_90a"],
        ["sm_100f", "sm_90"],
        ["sm_120"],
        [],
    )
    cases = [
        (names, gpu) for names in lists for gpu in ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0))
    ]
    answers = ask([f"runs_on {major} {minor} {' '.join(names)}" for names, (major, minor) in cases])
    assert answers == [str(int(runs_on(names, gpu))) for names, gpu in cases]


def test_staging_is_chosen_alike(ask: Ask) -> None:
    draw = random.Random(3)

    def size() -> int:
        return int(10 ** draw.uniform(1, 8.5))

    cases = [
        ([size() for _ in range(draw.randrange(6))], size(), draw.choice([None, size()]), 10 * size())
        for _ in range(300)
    ]
    cases.append(([1 << 62] * 3, 0, None, MIB))  # together more than int64 has
    lines = [
        f"staging {arena} {limit or 0} {available} {' '.join(map(str, sizes))}"
        for sizes, arena, limit, available in cases
    ]
    for case, answer in zip(cases, ask(lines), strict=True):
        try:
            chosen = choose_staging(*case)
            expected = f"{chosen.size_bytes} {chosen.slot_count}"
        except DeviceError as error:
            expected = error.code
        assert answer == expected, case
