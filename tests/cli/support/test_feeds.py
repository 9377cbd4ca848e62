"""Random inputs: every type, the same for the same seed, in range for what they may index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hybridc.cli.support.feeds import gather_feeds, numpy_dtype, random_feeds
from hybridc.errors import UsageError


@dataclass(frozen=True)
class Port:
    name: str
    shape: tuple[int, ...]
    type: str


@pytest.mark.parametrize(
    "name",
    [
        "float",
        "double",
        "float16",
        "bfloat16",
        "bool",
        "int8",
        "uint8",
        "int16",
        "int32",
        "uint32",
        "int64",
        "uint64",
    ],
)
def test_feeds_have_the_type_and_shape_asked_for(name: str) -> None:
    ports = [Port("x", (40, 50), f"tensor({name})"), Port("s", (), f"tensor({name})")]
    feeds = random_feeds(ports, seed=3)
    assert feeds["x"].shape == (40, 50) and feeds["s"].shape == ()
    assert feeds["x"].dtype == numpy_dtype(f"tensor({name})") == feeds["s"].dtype
    assert len(np.unique(feeds["x"].astype(np.float64))) > 1


def test_wide_integers_are_indices_of_anything() -> None:
    feed = random_feeds([Port("ids", (1000,), "tensor(int64)")], seed=0)["ids"]
    assert set(feed.tolist()) == {0, 1}


def test_bytes_use_their_whole_range() -> None:
    feed = random_feeds([Port("image", (100_000,), "tensor(int8)")], seed=0)["image"]
    assert (feed.min(), feed.max()) == (-128, 127)


def test_mask_of_a_decoder_counts_all_positions() -> None:
    mask = Port("attention_mask", (1, 64), "tensor(int64)")
    past = Port("past_key_values.0.key", (1, 2, 64, 8), "tensor(float)")
    assert random_feeds([mask, past], seed=0)["attention_mask"].all()
    assert not random_feeds([mask], seed=0)["attention_mask"].all()


@pytest.mark.parametrize("name", ["tensor(string)", "seq(tensor(float))"])
def test_types_without_arrays_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="unsupported input type"):
        random_feeds([Port("x", (1,), name)], seed=0)


def test_two_files_of_one_input_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(3, np.float32))
    with pytest.raises(UsageError, match="more than once") as refusal:
        gather_feeds([Port("x", (3,), "tensor(float)")], [("x", path), ("x", path)], None)
    assert refusal.value.code == "HC533"
