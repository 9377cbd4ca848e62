"""What the compiler keeps between runs is found again by all that it depends on, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybridc import compile_cache as module
from hybridc.caches import FileCache
from hybridc.compile_cache import Cache, NoCache, compile_cache, content_of, program_key, remembered
from hybridc.errors import UsageError
from tests.support.artifacts import cpu_model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HYBRIDC_CACHE_SIZE")
    return tmp_path / "hybridc" / "compiled"


@pytest.fixture
def cache(folder: Path) -> FileCache:
    return FileCache(folder)


class Computation:
    """Counts how often it is done."""

    def __init__(self, result: object = 1.5) -> None:
        self.result = result
        self.times = 0

    def __call__(self) -> object:
        self.times += 1
        return self.result


@pytest.mark.parametrize("result", [1.5, None, (), b"\0code", {"a": (1, "b")}])
def test_computation_is_done_once(cache: Cache, result: object) -> None:
    computation = Computation(result)
    for _ in range(3):
        assert remembered(cache, computation, ("double", "3")) == result
    assert computation.times == 1


def test_other_parts_are_another_computation(cache: Cache) -> None:
    computation = Computation()
    for parts in (("double", "3"), ("double", "4"), ("double3",), ("halve", "3")):
        remembered(cache, computation, parts)
    assert computation.times == 4


def test_damaged_entry_is_computed_again(cache: Cache, folder: Path) -> None:
    computation = Computation()
    remembered(cache, computation, ["double"])
    [entry] = folder.iterdir()
    entry.write_bytes(b"cos\nsystem\n(S'exit'\ntR.")
    assert remembered(cache, computation, ["double"]) == 1.5
    assert computation.times == 2


def test_without_a_cache_everything_is_computed_again() -> None:
    computation = Computation()
    for _ in range(2):
        remembered(NoCache(), computation, map(pytest.fail, ["parts are written"]))
    assert computation.times == 2


def test_another_version_of_a_package_is_another_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    before = program_key("double")
    monkeypatch.setattr(module, "_package", lambda name: f"{name} 99")
    module._installation.cache_clear()
    try:
        assert program_key("double") != before
    finally:
        monkeypatch.undo()
        module._installation.cache_clear()
    assert program_key("double") == before


def test_cache_is_trimmed_to_its_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDC_CACHE_SIZE", "3000B")
    with compile_cache(True) as cache:
        for number in range(5):
            cache.put(program_key(str(number)), bytes(1000))
    assert len(list(folder.iterdir())) == 2


@pytest.fixture
def unused(folder: Path) -> Iterator[None]:
    yield
    assert not folder.exists()


@pytest.mark.usefixtures("unused")
def test_no_cache_is_none() -> None:
    with compile_cache(False) as cache:
        assert remembered(cache, Computation(), ["double"]) == 1.5


@pytest.mark.usefixtures("unused")
def test_cache_of_no_bytes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDC_CACHE_SIZE", "0B")
    with compile_cache(True) as cache:
        assert remembered(cache, Computation(), ["double"]) == 1.5


@pytest.mark.parametrize("size", ["much", "50%", "12"])
def test_size_that_is_no_amount_is_refused(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("HYBRIDC_CACHE_SIZE", size)
    with pytest.raises(UsageError) as caught, compile_cache(True):
        pass
    assert (caught.value.code, caught.value.where) == ("HC510", "$HYBRIDC_CACHE_SIZE")


def test_graphs_of_one_size_are_told_apart() -> None:
    """Their `repr` is a summary, which is the same."""
    one, other = cpu_model().graph, cpu_model().graph
    assert content_of(one) == content_of(other)
    other = replace(one, kernels=(replace(one.kernels[0], function="other"), *one.kernels[1:]))
    assert repr(one) == repr(other) and content_of((one, {})) != content_of((other, {}))


def test_sets_have_no_order() -> None:
    assert content_of(frozenset("abc")) == content_of(set("cab")) != content_of(frozenset("ab"))
