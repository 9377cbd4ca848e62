"""Published image networks, drawn from all that timm has (https://github.com/huggingface/pytorch-image-models).

Needs timm and torchvision, which no extra of the project installs: `pip install timm torchvision`.
"""

from __future__ import annotations

import io
import logging
import warnings
from typing import Any

import numpy as np
import onnx

from drawn.case import Case

LARGEST = 60e6
"""Parameters: larger networks take minutes to export and are not drawn."""


def draw_network(rng: np.random.Generator) -> Case:
    """A family of architectures, then one of its networks; families all alike. Batch 1, random weights."""
    timm = _timm()
    while True:
        names = timm.list_models(module=str(rng.choice(timm.list_modules())))
        if names and _parameters(name := str(rng.choice(names))) <= LARGEST:
            return Case(name, lambda: _exported(name))


def _timm() -> Any:
    try:
        import timm
    except ImportError:
        raise SystemExit("drawn networks need two more packages: pip install timm torchvision") from None
    return timm


def _parameters(name: str) -> int:
    """Of a network whose weights are not made."""
    import torch

    timm = _timm()
    try:
        with torch.device("meta"):
            return sum(each.numel() for each in timm.create_model(name).parameters())
    except (NotImplementedError, RuntimeError):  # some compute constants as they are made
        return sum(each.numel() for each in timm.create_model(name).parameters())


def _exported(name: str) -> onnx.ModelProto:
    """By PyTorch's exporter. Running statistics are drawn, too: zeros and ones would fold to nothing."""
    import torch

    timm = _timm()
    torch.manual_seed(0)
    net = timm.create_model(name).eval()
    for layer in net.modules():
        if getattr(layer, "running_mean", None) is not None:
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.8, 1.2)
    example = (torch.randn(1, *net.default_cfg["input_size"]),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        return _written(torch, net, example)


def _written(torch: Any, net: Any, example: Any) -> onnx.ModelProto:
    """By the newer exporter, or the older one where that fails."""
    try:
        program = torch.onnx.export(net, example, dynamo=True, input_names=["x"], verbose=False)
        return program.model_proto
    except Exception:
        file = io.BytesIO()
        torch.onnx.export(net, example, file, dynamo=False, input_names=["x"])
        return onnx.load_from_string(file.getvalue())
