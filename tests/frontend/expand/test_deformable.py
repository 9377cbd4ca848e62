"""DeformConv by what samples images, and a convolution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from hybridc.errors import ModelError
from tests.support.expansion import assert_compiled_agrees, assert_expansion_agrees, expanded, parsed

SHAPES = [
    # image, weight, parts, attributes
    ((1, 2, 6, 7), (3, 2, 3, 3), 1, ""),
    ((2, 4, 9, 5), (6, 2, 2, 3), 2, "group=2, strides=[2,1], pads=[1,0,2,1]"),
    ((1, 6, 5, 8), (2, 3, 3, 1), 3, "group=2, dilations=[2,3], pads=[2,1,0,1]"),
    ((1, 3, 1, 6), (2, 3, 1, 2), 1, ""),
]


def extents(image: tuple[int, ...], kernel: tuple[int, ...], attributes: str) -> list[int]:
    """Of a result."""
    node = onnx.parser.parse_node(f"y = Conv <{attributes}> (x, w)".replace("<>", ""))
    given = {each.name: list(each.ints) for each in node.attribute}
    strides, dilations = (given.get(name, [1, 1]) for name in ("strides", "dilations"))
    pads = given.get("pads", [0] * 4)
    return [
        (image[i] + pads[i] + pads[2 + i] - (kernel[i] - 1) * dilations[i] - 1) // strides[i] + 1
        for i in (0, 1)
    ]


def network(
    image: tuple[int, ...], weight: tuple[int, ...], parts: int, attributes: str, kind: str = "float"
) -> tuple[str, dict[str, np.ndarray]]:
    """The text of a DeformConv with a bias and a mask, and offsets of which some lead out of the image."""
    out = extents(image[2:], weight[2:], attributes)
    taps = parts * int(np.prod(weight[2:]))
    rng = np.random.default_rng(len(out) + taps)
    dtype = np.float16 if kind == "float16" else np.float32
    offsets = rng.uniform(-3, 3, (image[0], taps * len(out), *out)).astype(dtype)
    listed = ", ".join(each for each in (attributes, f"offset_group={parts}") if each)
    inputs = [("x", image), ("w", weight), ("o", offsets.shape), ("b", weight[:1])]
    inputs.append(("m", (image[0], taps, *out)))
    text = ", ".join(f"{kind}{list(shape)} {name}" for name, shape in inputs)
    result = [image[0], weight[0], *out]
    return f"g ({text}) => ({kind}{result} y) {{ y = DeformConv <{listed}> (x, w, o, b, m) }}", {"o": offsets}


@pytest.mark.parametrize(("image", "weight", "parts", "attributes"), SHAPES)
def test_is_what_onnxruntime_computes(
    image: tuple[int, ...], weight: tuple[int, ...], parts: int, attributes: str
) -> None:
    text, feeds = network(image, weight, parts, attributes)
    result = assert_expansion_agrees(text, opset=19, feeds=feeds)
    assert "DeformConv" not in {node.op_type for node in result.graph.node}


def test_compiled(tmp_path: Path) -> None:
    text, feeds = network(*SHAPES[1])
    assert_compiled_agrees(tmp_path, text, opset=19, feeds=feeds)


def test_a_volume_is_moved_by_whole_offsets(tmp_path: Path) -> None:
    """All samples are moved alike: the convolution of a volume that is moved the other way."""
    import onnxruntime

    import hybridc

    moved, rng = (1, -1, 2), np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 2, 4, 5, 6), (3, 2, 2, 1, 2)))
    out = (1, 3, 3, 5, 5)
    offsets = np.tile(np.array(moved, np.float32).reshape(1, 3, 1, 1, 1), (1, 4, *out[2:4], out[4]))
    text = f"g (float{list(x.shape)} x, float{list(w.shape)} w, float{list(offsets.shape)} o) => "
    text += f"(float{list(out)} y) {{ y = DeformConv (x, w, o) }}"
    hybridc.compile(parsed(text, 19), tmp_path / "model.hyb", target="avx2")
    with hybridc.load(tmp_path / "model.hyb") as session:
        [found] = session.run(None, {"x": x, "w": w, "o": offsets})
    begins, ends = ([max(sign * by, 0) for by in moved] for sign in (-1, 1))
    padded = np.pad(x, [(0, 0), (0, 0), *zip(begins, ends, strict=True)])
    cut = [slice(end, end + n) for end, n in zip(ends, x.shape[2:], strict=True)]
    plain = parsed(
        f"g (float{list(x.shape)} x, float{list(w.shape)} w) => (float{list(out)} y) {{ y = Conv (x, w) }}"
    )
    reference = onnxruntime.InferenceSession(plain.SerializeToString())
    [wanted] = reference.run(None, {"x": padded[(slice(None), slice(None), *cut)], "w": w})
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_lines_are_refused() -> None:
    text = (
        "g (float[1,2,8] x, float[3,2,2] w, float[1,2,7] o) => (float[1,3,7] y) { y = DeformConv (x, w, o) }"
    )
    with pytest.raises(ModelError, match="2 or 3 axes"):
        expanded(parsed(text, 19))
