"""Examples from files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hybridc.artifact.manifest import Port
from hybridc.errors import UsageError
from hybridc.labels import Labels
from hybridc.training.data import Dataset, load_dataset, read_cifar10

INPUTS, TARGETS = (Port("images", (4, 1, 2, 2), "float32"),), (Port("target", (4,), "int64"),)


def refusal(path: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_dataset(path, INPUTS, TARGETS)
    return caught.value


def test_arrays_are_found_by_name_and_put_into_the_models_type(tmp_path: Path) -> None:
    images, labels = np.arange(24).reshape(6, 1, 2, 2), np.arange(6, dtype=np.uint8)
    np.savez(tmp_path / "named.npz", images=images, target=labels, other=labels)
    np.savez(tmp_path / "short.npz", x=images.astype(np.float64), y=labels)
    for name in ("named", "short"):
        data = load_dataset(tmp_path / f"{name}.npz", INPUTS, TARGETS)
        assert data.size == 6
        inputs, targets = data.batch(np.array([4, 1]))
        assert inputs["images"].dtype == np.float32 and targets["target"].dtype == np.int64
        np.testing.assert_array_equal(inputs["images"], images[[4, 1]])
        np.testing.assert_array_equal(targets["target"], [4, 1])


def test_label_without_a_class_is_refused_with_its_position(tmp_path: Path) -> None:
    targets = (Port("target", (4,), "int64", (Labels(3),)),)
    labels = np.array([0, 1, 2, 0, 3, 1])
    np.savez(tmp_path / "data.npz", images=np.zeros((6, 1, 2, 2), np.float32), target=labels)
    with pytest.raises(UsageError) as caught:
        load_dataset(tmp_path / "data.npz", INPUTS, targets)
    assert caught.value.code == "HC581" and "'target' has the label 3 at [4]" in caught.value.what
    assert caught.value.where == str(tmp_path / "data.npz")


def test_digest_tells_names_types_and_every_value() -> None:
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    labels = np.arange(6)
    data = Dataset({"x": values}, {"y": labels})
    assert data.digest() == Dataset({"x": values.copy(order="F")}, {"y": labels.copy()}).digest()
    changed = values.copy()
    changed[5, 1] += 1
    others = [
        Dataset({"x": changed}, {"y": labels}),
        Dataset({"x": values[::-1]}, {"y": labels}),
        Dataset({"x": values.view(np.int32)}, {"y": labels}),
        Dataset({"x": values.reshape(6, 1, 2)}, {"y": labels}),
        Dataset({"z": values}, {"y": labels}),
        Dataset({"x": values}, {"y": np.roll(labels, 1)}),
    ]
    assert len({data.digest(), *(other.digest() for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"images": np.zeros((6, 1, 2, 2))}, "no array 'target'"),
        ({"x": np.zeros((6, 1, 2, 3)), "y": np.zeros(6, int)}, r"float64\[6, 1, 2, 3\]"),
        ({"x": np.zeros((6, 1, 2, 2)), "y": np.zeros(6)}, "'target' is float64"),
        ({"x": np.zeros((6, 1, 2, 2)), "y": np.zeros(5, int)}, "5, 6 rows"),
        ({"x": np.zeros((0, 1, 2, 2)), "y": np.zeros(0, int)}, "0 rows"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], why: str) -> None:
    np.savez(tmp_path / "data.npz", **arrays)  # type: ignore[arg-type]
    error = refusal(tmp_path / "data.npz")
    assert error.code == "HC572"
    assert re.search(why, str(error))


def test_files_that_are_no_examples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "single.npy", np.zeros(3))
    pickled = np.array([{"a": 1}], dtype=object)
    np.savez(tmp_path / "pickled.npz", x=pickled, y=pickled)
    for name in ("text.npz", "single.npy", "pickled.npz", "missing.npz"):
        assert refusal(tmp_path / name).code == "HC571"


def cifar_records(seed: int, count: int = 3) -> np.ndarray:
    random = np.random.default_rng(seed)
    records = random.integers(0, 256, (count, 3073), dtype=np.uint8)
    records[:, 0] = random.integers(0, 10, count)
    return records


def test_cifar10_is_read_from_its_binary_format(tmp_path: Path) -> None:
    for number in (2, 1):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(cifar_records(number).tobytes())
    (tmp_path / "test_batch.bin").write_bytes(cifar_records(9).tobytes())
    images, labels = read_cifar10(tmp_path)
    first = cifar_records(1)
    assert images.shape == (6, 3, 32, 32) and labels.dtype == np.int64
    np.testing.assert_array_equal(labels[:3], first[:, 0])
    assert images[1, 2, 5, 7] == first[1, 1 + 2 * 1024 + 5 * 32 + 7]
    held_out, _ = read_cifar10(tmp_path / "test_batch.bin")
    np.testing.assert_array_equal(held_out.reshape(3, -1), cifar_records(9)[:, 1:])
    ports = (Port("x", (8, 3, 32, 32), "float32"),), TARGETS
    data = load_dataset(tmp_path, *ports)
    np.testing.assert_allclose(data.inputs["x"] * 255, images, atol=1e-4)


def test_damaged_cifar10_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.bin").write_bytes(cifar_records(0).tobytes()[:-1])
    labels = cifar_records(0)
    labels[1, 0] = 10
    (tmp_path / "label.bin").write_bytes(labels.tobytes())
    for name in ("short.bin", "label.bin", ""):
        assert refusal(tmp_path / name).code == "HC571"
