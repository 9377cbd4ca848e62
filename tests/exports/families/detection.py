"""A detector whose results are as many boxes as there are, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18
from torch import Tensor, nn
from torch.nn import functional as f
from torch.onnx import register_custom_op_symbolic

from tests.exports.architecture import Architecture, normal

SCHEMA = "(Tensor boxes, Tensor scores, float overlap) -> Tensor"
MOST = 1 << 30


@torch.library.custom_op("detection::nms", mutates_args=(), schema=SCHEMA)
def suppressed(boxes: Tensor, scores: Tensor, overlap: float) -> Tensor:
    """Numbers of the boxes that no better one overlaps by more, best first; as torchvision's `nms`."""
    kept: list[int] = []
    for i in scores.argsort(descending=True).tolist():
        if all(_overlap(boxes[i], boxes[j]) <= overlap for j in kept):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.long)


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    """Of two boxes, intersection over union."""
    sides = (torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])).clamp(min=0)
    return sides.prod() / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - sides.prod())


@suppressed.register_fake
def _(boxes: Tensor, scores: Tensor, overlap: float) -> Tensor:
    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)


def _by_dynamo(boxes: Any, scores: Any, overlap: float) -> Any:
    """The node that torchvision's `nms` becomes, in which boxes are numbered behind image and class."""
    op: Any = opset18
    alone, scored = op.Unsqueeze(boxes, [0]), op.Unsqueeze(scores, [0, 1])
    limits = op.Constant(value_ints=[MOST]), op.Constant(value_floats=[overlap])
    chosen = op.NonMaxSuppression(alone, scored, *limits)
    return op.Squeeze(op.Gather(chosen, op.Constant(value_ints=[2]), axis=1), [1])


def _by_script(graph: Any, boxes: Any, scores: Any, overlap: Any) -> Any:
    """The same for the exporter that traces."""

    def constant(values: Any) -> Any:
        return graph.op("Constant", value_t=torch.as_tensor(values))

    number = overlap.node().f("value")
    alone = graph.op("Unsqueeze", boxes, constant([0]))
    scored = graph.op("Unsqueeze", scores, constant([0, 1]))
    limits = constant([MOST]), constant(torch.tensor([number]))
    chosen = graph.op("NonMaxSuppression", alone, scored, *limits)
    return graph.op("Squeeze", graph.op("Gather", chosen, constant([2]), axis_i=1), constant([1]))


register_custom_op_symbolic("detection::nms", _by_script, 17)
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.detection.nms.default: _by_dynamo}


class Detector(nn.Module):
    """Boxes and scores of each cell of a small grid; those that overlap better ones are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.sides, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 1, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = f.relu(self.second(f.relu(self.first(image))))
        sides = self.sides(x)[0].flatten(1).transpose(0, 1).sigmoid() * 12
        rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
        centres = torch.stack([columns, rows], dim=-1).reshape(-1, 2).to(sides.dtype) * 4 + 2
        boxes = torch.cat([centres - sides[:, :2], centres + sides[:, 2:]], dim=1)
        scores = self.scores(x)[0].flatten().sigmoid()
        kept = torch.ops.detection.nms(boxes, scores, 0.3)
        return boxes[kept], scores[kept], kept


DETECTION = {"detector": Architecture(Detector, {"image": normal(1, 3, 32, 32)}, {})}
