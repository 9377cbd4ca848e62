"""Networks of PyTorch as files to train, as the documentation says."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch


def exported_for_training(net: Any, example: Any, path: Path) -> None:
    """Input `x` of any number of examples, output `logits`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about this exporter, which keeps BatchNorm as it is
        torch.onnx.export(
            net,
            (example,),
            str(path),
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            input_names=["x"],
            output_names=["logits"],
            dynamic_axes={"x": {0: "N"}},
        )
