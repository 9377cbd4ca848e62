"""Types of at most 8 bits, bit for bit as onnx casts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hybridc.errors import ModelError, UsageError
from hybridc.frontend import read_model
from tests.e2e.test_operators import TARGETS, device, run
from tests.support.expansion import parsed

__all__ = ["device"]

EIGHT_BITS = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
NAMES = (*EIGHT_BITS, "FLOAT4E2M1", "FLOAT8E8M0", "INT4", "UINT4", "INT2", "UINT2")


def dtype_of(name: str) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(name))


@dataclass
class Casts:
    """A model of casts, with what they are to give."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    expected: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, source: str, to: str, expected: np.ndarray, **how: Any) -> None:
        output = f"y{len(self.nodes)}"
        to_type = TensorProto.DataType.Value(to)
        self.nodes.append(helper.make_node("Cast", [source], [output], to=to_type, **how))
        self.expected[output] = expected

    def proto(self) -> onnx.ModelProto:
        inputs, outputs = (
            [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
                for n, a in arrays.items()
            ]
            for arrays in (self.feeds, self.expected)
        )
        graph = helper.make_graph(self.nodes, "casts", inputs, outputs)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)


def casts(names: Sequence[str]) -> Casts:
    """Every number of each type to float32, and to each type every number that float16 has, and neighbours of
    them in float32."""
    made = Casts()
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    singles = halves.astype(np.float32)
    with np.errstate(all="ignore"):
        singles = np.concatenate([singles, *(np.nextafter(singles, np.float32(to)) for to in (0, np.inf))])
    made.feeds |= {"singles": singles, "halves": halves[::7]}
    made.feeds |= {"small": np.arange(-40, 60, dtype=np.float32) / 4}
    made.feeds["words"] = np.array([-9, 7, 300, -(2**31)], np.int32)
    for name in names:
        dtype = dtype_of(name)
        with np.errstate(all="ignore"):
            if name in EIGHT_BITS:
                made.add("singles", name, numpy_helper.saturate_cast(singles, dtype))
                made.add("halves", name, halves[::7].astype(dtype), saturate=0)
            elif name == "FLOAT8E8M0":
                for mode in ("up", "down", "nearest"):
                    scales = numpy_helper.to_float8e8m0(singles, True, mode)
                    made.add("singles", name, scales, round_mode=mode)
            elif name == "FLOAT4E2M1":
                made.add("singles", name, singles.astype(dtype))
            else:
                made.add("small", name, made.feeds["small"].astype(dtype))
                made.add("words", name, made.feeds["words"].astype(dtype))
        bits = ml_dtypes.finfo(dtype).bits if "FLOAT" in name else int(name[-1])
        codes = np.arange(1 << bits, dtype=np.uint8).view(dtype)
        made.feeds[name] = codes
        made.add(name, "FLOAT", codes.astype(np.float32))
    return made


@pytest.mark.parametrize(
    ("names", "target"),
    [
        pytest.param(("FLOAT8E5M2", "INT4"), "avx2", marks=pytest.mark.isa("avx2")),
        *(
            pytest.param(NAMES, target, marks=[pytest.mark.isa("avx2"), pytest.mark.slow])
            for target in ("avx2", "cuda:sm_75+avx2")
        ),
    ],
    ids=["some", "all", "all on a GPU"],
)
def test_casts_have_the_bits_of_onnx(names: Sequence[str], target: str, tmp_path: Path) -> None:
    """But for the sign of what is not a number, which a cast from float16 may drop."""
    model = casts(names)
    results = run(model.proto(), model.feeds, target, tmp_path)
    for got, wanted in zip(results, model.expected.values(), strict=True):
        assert got.dtype == wanted.dtype
        values = got.astype(np.float32), wanted.astype(np.float32)
        np.testing.assert_array_equal(*values)
        is_number = ~np.isnan(values[1])
        found, expected = (np.signbit(each)[is_number] for each in values)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("target", TARGETS[::2])
def test_codes_are_moved_and_cast_in_a_network(target: str, tmp_path: Path) -> None:
    text = """g (float8e4m3fn[2, 3] x, float[3, 2] z) => (float8e4m3fn[6] moved, float[6] y, float[2, 3] v)
    <int64[1] shape = {-1}, float8e4m3fn[2, 3] w = {1, 2, 3, 4, 5, 6}> {
        turned = Transpose(x)
        row = Reshape(turned, shape)
        y = Cast <to = 1>(row)
        narrow = Cast <to = 17>(z)
        back = Transpose(narrow)
        moved = Reshape(back, shape)
        known = Cast <to = 1>(w)
        fed = Cast <to = 1>(x)
        v = Add(known, fed)
    }"""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3)).astype(ml_dtypes.float8_e4m3fn)
    z = rng.standard_normal((3, 2)).astype(np.float32)
    model = parsed(text, 24)
    moved, y, v = run(model, {"x": x, "z": z}, target, tmp_path)
    np.testing.assert_array_equal(moved, z.T.reshape(-1).astype(ml_dtypes.float8_e4m3fn))
    np.testing.assert_array_equal(y, x.T.reshape(-1).astype(np.float32))
    weight = numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "w"))
    np.testing.assert_array_equal(v, weight.astype(np.float32) + x.astype(np.float32))


def test_arithmetic_of_codes_is_refused() -> None:
    text = "g (float8e4m3fn[2] x) => (float8e4m3fn[2] y) { y = Relu(x) }"
    model = parsed(text, 24)
    with pytest.raises(ModelError):
        read_model(model)
    twice = parsed("g (int4[2] x) => (int4[2] y) { y = Pad(x, p) }".replace("g (", "g (int64[2] p, "), 24)
    with pytest.raises(ModelError) as caught:
        read_model(twice, values={"p": np.array([0, 1])})
    assert caught.value.code == "HC110"


def test_feeds_have_the_type_of_the_file(tmp_path: Path) -> None:
    model = parsed("g (int4[3] x) => (int8[3] y) { y = Cast <to = 3>(x) }", 24)
    x = np.array([-8, 7, -1])
    [y] = run(model, {"x": x.astype(ml_dtypes.int4)}, "avx2", tmp_path / "taken")
    assert y.tolist() == [-8, 7, -1]
    with pytest.raises(UsageError, match="HC553"):
        run(model, {"x": x.astype(np.int8)}, "avx2", tmp_path / "refused")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "code"), [pytest.param("float16", 10, marks=pytest.mark.slow), ("bfloat16", 16)]
)
def test_an_output_may_be_known_when_compiling(name: str, code: int, target: str, tmp_path: Path) -> None:
    text = f"""g ({name}[3] x) => ({name}[3] y, {name}[2] c) {{
        y = Relu(x)
        k = Constant <value_floats = [1.0, 3.0]>()
        c = Cast <to = {code}>(k)
    }}"""
    x = np.array([-1, 0, 2], dtype_of(name.upper()))
    y, c = run(parsed(text, 22), {"x": x}, target, tmp_path)
    assert y.dtype == c.dtype == x.dtype
    assert y.tolist() == [0, 0, 2] and c.tolist() == [1, 3]
