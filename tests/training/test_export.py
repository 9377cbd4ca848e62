"""The user's model, copied into the artifact and written with other weights, its external data included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hybridc.errors import UsageError
from hybridc.passes.training.spec import TrainingSpec
from hybridc.training.artifact import MODEL_FOLDER, TrainingArtifact, TrainingManifest
from hybridc.training.compile import _copy_model
from hybridc.training.export import export_onnx
from tests.training.conftest import network


def artifact(folder: Path, source: Path | onnx.ModelProto | bytes) -> TrainingArtifact:
    name = _copy_model(source, folder / MODEL_FOLDER)
    return TrainingArtifact(
        folder, TrainingManifest(TrainingSpec(), name, "", "", (), (), "loss", {}, None, ())
    )


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("is_external", [False, True])
def test_named_weights_are_replaced_and_others_kept(tmp_path: Path, is_external: bool) -> None:
    original = network()
    source = tmp_path / "source" / "net.onnx"
    source.parent.mkdir()
    onnx.save(network(), source, save_as_external_data=is_external, location="w.bin")
    (tmp_path / "artifact").mkdir()
    made = artifact(tmp_path / "artifact", source)
    name, *_ = weights(original)
    export_onnx(made, {name: weights(original)[name] + 1}, tmp_path / "out" / "trained.onnx")
    found = onnx.load(tmp_path / "out" / "trained.onnx")
    assert len(list((tmp_path / "out").iterdir())) == 1 + is_external
    for other, value in weights(network()).items():
        np.testing.assert_array_equal(weights(found)[other], value + (other == name))
    assert found.graph.node == original.graph.node


def test_model_in_memory_is_kept_as_it_is(tmp_path: Path) -> None:
    for number, source in enumerate((network(), network().SerializeToString())):
        folder = tmp_path / str(number)
        folder.mkdir()
        export_onnx(artifact(folder, source), {}, folder / "same.onnx")
        assert onnx.load(folder / "same.onnx") == network()


def test_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    made = artifact(tmp_path, network())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        export_onnx(made, {}, tmp_path / "file" / "trained.onnx")
    assert caught.value.code == "HC562"
