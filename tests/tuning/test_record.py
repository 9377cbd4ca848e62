"""The file of measurements: what is added comes back, whoever adds beside it, and damage is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridc.errors import UsageError
from hybridc.tuning.record import Entry, add_to_record, default_path, read_record

MakeEntry = Callable[..., Entry]


def test_entries_come_back_as_they_were_added(tmp_path: Path, entry: MakeEntry) -> None:
    path = tmp_path / "new folder" / "record.json"
    entries = {"k1": entry(b=0.5), "k2": entry("c")}
    assert add_to_record(path, entries) == entries
    assert read_record(path) == entries


def test_sessions_are_joined_tile_by_tile(tmp_path: Path, entry: MakeEntry) -> None:
    path = tmp_path / "record.json"
    add_to_record(path, {"k": entry(b=0.5, c=0.7)})
    known = add_to_record(path, {"k": entry(c=0.4, d=0.9)})
    assert known["k"].relative == {"a": 1.0, "b": 0.5, "c": 0.4, "d": 0.9}


def test_measurements_against_another_predicted_tile_are_dropped(tmp_path: Path, entry: MakeEntry) -> None:
    path = tmp_path / "record.json"
    add_to_record(path, {"k": entry("a", b=0.5)})
    assert add_to_record(path, {"k": entry("c", d=0.9)})["k"].relative == {"c": 1.0, "d": 0.9}


@pytest.mark.parametrize(("b", "best"), [(0.97, "b"), (0.99, "a"), (1.5, "a")])
def test_predicted_tile_is_left_only_for_a_clear_gain(entry: MakeEntry, b: float, best: str) -> None:
    assert entry(b=b).best() == best


def test_those_who_add_at_the_same_time_lose_nothing(tmp_path: Path, entry: MakeEntry) -> None:
    path = tmp_path / "record.json"
    with ThreadPoolExecutor(8) as pool:  # a lock of a file is for each opening of it, also within a process
        list(pool.map(lambda i: add_to_record(path, {f"k{i}": entry(b=0.5)}), range(40)))
    assert set(read_record(path)) == {f"k{i}" for i in range(40)}


def _one_entry(times: str) -> str:
    fields = '"kernel": "f", "rule": "r", "isa": "avx2", "threads": 2, "processor": "p", "version": "v"'
    return f'{{"format": 1, "kernels": {{"k": {{{fields}, "predicted": "a", {times}}}}}}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "not json",
        '{"format": 2, "kernels": {}}',
        '{"format": 1, "kernels": 3}',
        '{"format": 1, "kernels": {"k": {"kernel": "f"}}}',
        '{"format": 1, "kernels": {"k": 7}}',
        _one_entry('"ms": 1.0, "relative": {"a": NaN}'),
        _one_entry('"ms": 1.0, "relative": {"a": 1.0, "b": 0}'),
        _one_entry('"ms": 1.0, "relative": {"b": 1.0}'),
        _one_entry('"ms": "1", "relative": {"a": 1.0}'),
        _one_entry(f'"ms": 1{"0" * 400}, "relative": {{"a": 1.0}}'),
        _one_entry('"ms": 1.0, "relative": [1.0]'),
        "\udcff",
        "[" * 100_000,
    ],
)
def test_damaged_record_is_refused_and_left_alone(tmp_path: Path, entry: MakeEntry, text: str) -> None:
    path = tmp_path / "record.json"
    damaged = text.encode(errors="surrogateescape")
    path.write_bytes(damaged)
    for use in (lambda: read_record(path), lambda: add_to_record(path, {"k": entry()})):
        with pytest.raises(UsageError) as refusal:
            use()
        assert refusal.value.code == "HC523"
    assert path.read_bytes() == damaged


def test_missing_record_is_refused_when_it_is_only_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file") as refusal:
        read_record(tmp_path / "record.json")
    assert refusal.value.code == "HC523"


def test_write_that_fails_leaves_the_old_record(
    tmp_path: Path, entry: MakeEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    add_to_record(path, {"k": entry()})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="No space left") as refusal:
        add_to_record(path, {"other": entry()})
    assert refusal.value.code == "HC524"
    assert set(read_record(path)) == {"k"}
    assert {p.name for p in tmp_path.iterdir()} == {"record.json", "record.json.lock"}


def test_place_that_cannot_be_written_is_refused(tmp_path: Path, entry: MakeEntry) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as refusal:
        add_to_record(tmp_path / "file" / "record.json", {"k": entry()})
    assert refusal.value.code == "HC524"


@pytest.mark.parametrize("name", ["folder", ""])
def test_folder_in_place_of_a_record_is_refused(
    tmp_path: Path, entry: MakeEntry, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    uses = {"HC523": lambda: read_record(Path(name)), "HC524": lambda: add_to_record(Path(name), {})}
    for code, use in uses.items():
        with pytest.raises(UsageError, match="Is a directory") as refusal:
            use()
        assert (refusal.value.code, refusal.value.remedy) == (code, "choose another --tune-record")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_default_record_is_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "hybridc" / "tuning.json"


def test_texts_of_damaged_records_are_damaged_by_their_times_alone(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(_one_entry('"ms": 1.0, "relative": {"a": 1.0, "b": 0.5}'))
    assert read_record(path)["k"].best() == "b"
