"""Trained weights back in the user's own model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from hybridc.artifact.store import cannot_write
from hybridc.frontend.load import load
from hybridc.frontend.tensors import check_tensors
from hybridc.scratch import scratch_folder
from hybridc.training.artifact import TrainingArtifact
from hybridc.training.inference import to_inference


def export_onnx(
    artifact: TrainingArtifact, values: Mapping[str, np.ndarray], path: Path, *, for_training: bool = False
) -> None:
    """Write the model with these initializers replaced, whole or not at all.

    It is in inference form, as `to_inference` makes it; `for_training` leaves all but the initializers
    untouched. External data is put into one file beside it, named like the model. Raises UsageError HC562.
    """
    loaded = load(artifact.model)
    check_tensors(loaded)
    model, is_external = loaded.proto, False
    for tensor in model.graph.initializer:
        is_external |= tensor.data_location == TensorProto.EXTERNAL
        if tensor.name in values:
            _replace(tensor, values[tensor.name])
        elif tensor.data_location == TensorProto.EXTERNAL:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(artifact.model.parent))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    if not for_training:
        to_inference(model, has_loss=not artifact.manifest.spec.loss)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(f".{path.name}-", path.parent) as folder:
            onnx.save(
                model,
                str(folder / path.name),
                save_as_external_data=is_external,
                location=f"{path.name}.data" if is_external else None,
            )
            for made in sorted(folder.iterdir(), reverse=True):  # the data first
                os.replace(made, path.parent / made.name)
    except OSError as error:
        raise cannot_write(path, error) from None


def _replace(tensor: TensorProto, value: np.ndarray) -> None:
    fresh = onnx.numpy_helper.from_array(np.ascontiguousarray(value), tensor.name)
    fresh.doc_string = tensor.doc_string
    tensor.CopyFrom(fresh)
