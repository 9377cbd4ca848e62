"""Small networks of each kind that the tools know: of hybridc's models, and as torch exports them."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridc.models import MODELS


class Recurrent(nn.Module):
    """Words through a bidirectional LSTM, whose last step is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.lstm = nn.LSTM(24, 32, bidirectional=True, batch_first=True)
        self.classes = nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.classes(self.lstm(self.words(ids))[0][:, -1])


class RootMeanSquare(nn.Module):
    """Normalisation by the root of the mean of squares, as models of Hugging Face write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class DecoderLayer(nn.Module):
    """As of Llama: root mean squares, rotated heads that share keys, gated layers; causal."""

    def __init__(self, width: int = 64, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, self.depth = heads, shared, width // heads
        self.first, self.second = RootMeanSquare(width), RootMeanSquare(width)
        self.packed = nn.Linear(width, width + 2 * shared * self.depth, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 96, bias=False) for _ in range(2))
        self.down = nn.Linear(96, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._mixed(self.packed(self.first(x))))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _mixed(self, packed: Tensor) -> Tensor:
        batch, length, _ = packed.shape
        q, k, v = packed.split([n * self.depth for n in (self.heads, self.shared, self.shared)], dim=-1)
        q, k, v = (t.view(batch, length, -1, self.depth).transpose(1, 2) for t in (q, k, v))
        q, k = self._rotated(q), self._rotated(k)
        k, v = (t.repeat_interleave(self.heads // self.shared, dim=1) for t in (k, v))
        mask = torch.full((length, length), -1e4).triu(1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(self.depth) + mask, dim=-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, -1)

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.depth // 2
        angles = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
        cos, sin = (f(angles).repeat(1, 2) for f in (torch.cos, torch.sin))
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class Inverted(nn.Module):
    """A block as of MobileNet V3: depthwise, squeezed and excited, with hard swish."""

    def __init__(self, channels: int, wide: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, 8, 1),
            nn.ReLU(),
            nn.Conv2d(8, wide, 1),
            nn.Hardsigmoid(),
        )
        self.out = nn.Conv2d(wide, channels, 1)
        self.is_residual = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = self.out(y * self.squeeze(y))
        return x + y if self.is_residual else y


class UNet(nn.Module):
    """As of Stable Diffusion: group normalisation and SiLU, upsampling, joined branches, one attention."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.first = self._block(width, width)
        self.norm = nn.LayerNorm(width)
        self.mixed = nn.MultiheadAttention(width, 2, batch_first=True)
        self.last = self._block(2 * width, width)
        self.out = nn.Conv2d(width, 4, 3, padding=1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.down(x)
        y = y + self.first(y)
        tokens = self.norm(y.flatten(2).transpose(1, 2))
        y = y + self.mixed(tokens, tokens, tokens)[0].transpose(1, 2).view_as(y)
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        return self.out(self.last(torch.cat([x, y], dim=1)))


def exported(module: nn.Module, example: Tensor) -> onnx.ModelProto:
    """By TorchScript, at opset 17."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exported.onnx"
        torch.onnx.export(module.eval(), (example,), path, dynamo=False, opset_version=17, input_names=["x"])
        return onnx.load(path)


def _words(length: int) -> Tensor:
    return torch.arange(length)[None] * 7 % 50


def _recurrent() -> onnx.ModelProto:
    return exported(Recurrent(), _words(11))


def _encoder_layers() -> onnx.ModelProto:
    layer = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True, norm_first=True)
    # its fused kernel has no ONNX
    torch.backends.mha.set_fastpath_enabled(False)
    return exported(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, 16, 64))


def _decoder() -> onnx.ModelProto:
    layers = [DecoderLayer(), DecoderLayer()]
    head = [RootMeanSquare(64), nn.Linear(64, 50, bias=False)]
    return exported(nn.Sequential(nn.Embedding(50, 64), *layers, *head), _words(13))


def _mobile() -> onnx.ModelProto:
    layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.Hardswish(), Inverted(16, 48, 2), Inverted(16, 64, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return exported(nn.Sequential(*layers, *head), torch.randn(1, 3, 32, 32))


def _unet() -> onnx.ModelProto:
    return exported(UNet(), torch.randn(1, 4, 16, 16))


def made(name: str) -> onnx.ModelProto:
    """The network of this name, of the same weights always."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # the exporter tells of what it will not do some day
        return NETWORKS[name]()


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": lambda: MODELS["mlp"](inputs=64, hidden=96, batch=4),
    "lenet": lambda: MODELS["lenet"](),
    "resnet": lambda: MODELS["resnet"](depth=18, size=32, width=4, classes=10),
    "mobilenet_v2": lambda: MODELS["mobilenet_v2"](size=32, width=0.25, classes=10),
    "unet": lambda: MODELS["unet"](size=32, width=8, levels=2, batch_norm=True),
    "super_resolution": lambda: MODELS["super_resolution"](size=16, width=8, blocks=2),
    "atacworks": lambda: MODELS["atacworks"](length=600, blocks=2, peak_blocks=1),
    "bert": lambda: MODELS["bert"](
        tokens=16, layers=2, hidden=64, heads=4, vocabulary=50, positions=32, attention_mask=True
    ),
    "encoder": lambda: MODELS["encoder"](tokens=16, layers=2, hidden=64, heads=4, vocabulary=50),
    "vit": lambda: MODELS["vit"](size=32, patch=8, width=64, depth=2, heads=4, mlp=128, classes=10),
    "torch lstm": _recurrent,
    "torch encoder": _encoder_layers,
    "torch decoder": _decoder,
    "torch mobile": _mobile,
    "torch unet": _unet,
}
