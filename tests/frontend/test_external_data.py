"""A model's data may only come from files that lie inside its own folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.helper import make_node

from hybridc.errors import ModelError
from hybridc.frontend import codes, read_model


def refusal(source: str | Path | bytes | onnx.ModelProto) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_model(source)
    assert caught.value.where and caught.value.remedy
    return caught.value


@pytest.fixture
def weighted(make_model: Callable[..., onnx.ModelProto]) -> onnx.ModelProto:
    weights = {"w": np.arange(3, dtype=np.float32)}
    return make_model([make_node("Add", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"], weights)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model" / "data").mkdir(parents=True)
    (tmp_path / "model" / "data" / "w.bin").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    return tmp_path / "model"


@pytest.fixture
def save(weighted, folder):
    def save(location: str, offset: str = "0", length: str | None = "12") -> Path:
        tensor = weighted.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", offset), ("length", length)):
            if value is not None:
                tensor.external_data.add(key=key, value=value)
        path = folder / "m.onnx"
        path.write_bytes(weighted.SerializeToString())
        return path

    return save


@pytest.mark.parametrize("length", ["12", None])
def test_file_inside_the_folder_is_mapped(save, length):
    imported = read_model(save("data/w.bin", offset="4", length=length))
    np.testing.assert_array_equal(imported.weights["w"], [1, 2, 3])


def test_link_inside_the_folder_is_followed(save, folder):
    (folder / "link.bin").symlink_to(folder / "data" / "w.bin")
    np.testing.assert_array_equal(read_model(save("link.bin")).weights["w"], [0, 1, 2])


@pytest.mark.parametrize(
    "location", ["../secret.bin", "data/../../secret.bin", "", "data", "absent.bin", "a\0b", "a" * 300]
)
def test_other_places_are_refused(save, location):
    assert refusal(save(location)).code == codes.EXTERNAL_DATA


def test_absolute_path_is_refused(save, folder):
    assert refusal(save(str(folder / "data" / "w.bin"))).code == codes.EXTERNAL_DATA


def test_links_that_lead_outside_are_refused(save, folder):
    (folder / "link.bin").symlink_to(folder.parent / "secret.bin")
    (folder / "up").symlink_to(folder.parent)
    assert refusal(save("link.bin")).code == codes.EXTERNAL_DATA
    assert refusal(save("up/secret.bin")).code == codes.EXTERNAL_DATA


@pytest.mark.parametrize(
    ("offset", "length"), [("24", "12"), ("-4", "12"), ("x", "12"), ("99999999999", "12")]
)
def test_range_beyond_the_file_is_refused(save, offset, length):
    assert refusal(save("data/w.bin", offset, length)).code == codes.EXTERNAL_DATA


def test_length_that_contradicts_the_shape_is_refused(save):
    assert refusal(save("data/w.bin", "0", "16")).code == codes.MALFORMED_TENSOR


def test_bytes_and_protos_have_no_folder(save):
    path = save("data/w.bin")
    assert refusal(path.read_bytes()).code == codes.EXTERNAL_DATA
    assert refusal(onnx.load(path, load_external_data=False)).code == codes.EXTERNAL_DATA
    assert read_model(onnx.load(path)).weights["w"].shape == (3,)
