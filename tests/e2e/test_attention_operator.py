"""ONNX's Attention, as an operator or with its body inlined, makes no tensor of scores on either device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import pytest

import hybridc
from hybridc.options import CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.progress import NullProgress
from hybridc.targets import parse_target

HEAD = '<ir_version: 10, opset_import: ["" : 23]>\n'
HEADS = "{t}[2,4,9,16] q, {t}[2,2,20,16] k, {t}[2,2,20,16] v"
CASES = {
    "plain": ("float", HEADS, "", "q, k, v"),
    "half": ("float16", HEADS, "<is_causal = 1>", "q, k, v"),
    "capped": ("float", HEADS, "<softcap = 2.0, scale = 0.5>", "q, k, v"),
    "hidden_rows": ("float", HEADS + ", bool[2,1,9,20] m", "", "q, k, v, m"),
    "mask_of_heads": ("float", HEADS + ", {t}[2,4,9,20] m", "", "q, k, v, m"),
    "mask_of_keys": ("float16", HEADS + ", {t}[2,1,1,20] m", "", "q, k, v, m"),
    "heads_side_by_side": (
        "float",
        "{t}[2,9,64] q, {t}[2,20,64] k, {t}[2,20,64] v",
        "<q_num_heads = 4, kv_num_heads = 4>",
        "q, k, v",
    ),
}


def network(case: str, *, is_inlined: bool) -> onnx.ModelProto:
    kind, inputs, attributes, operands = CASES[case]
    rank = inputs.partition("]")[0].count(",") + 1
    shape = "2,4,9,16" if rank == 4 else "2,9,64"
    text = f"g ({inputs.format(t=kind)}) => ({kind}[{shape}] y) {{ y = Attention {attributes} ({operands}) }}"
    model = onnx.parser.parse_model(HEAD + text)
    if not is_inlined:
        return model
    inferred = onnx.shape_inference.infer_shapes(model)
    return onnx.inliner.inline_selected_functions(inferred, [("", "Attention")], inline_schema_functions=True)


def fed(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    random, feeds = np.random.default_rng(5), {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = random.standard_normal(shape).astype(dtype)
        if dtype.kind == "b":
            feeds[value.name] = random.random(shape) < 0.7
            feeds[value.name][1, 0, 3] = False  # a query that sees no key
    return feeds


@pytest.mark.parametrize("target", ["cuda:sm_86+avx2", "avx2"])
@pytest.mark.parametrize("is_inlined", [False, True], ids=["operator", "body"])
@pytest.mark.parametrize("case", CASES)
def test_no_scores_are_stored(tmp_path: Path, case: str, is_inlined: bool, target: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(network(case, is_inlined=is_inlined), path)
    imported = import_model(path, CompileOptions(target=parse_target(target)))[1]
    done = run_stages(imported, NullProgress(), stop_after="graph")
    names = [kernel.function for kernel in done.graph.kernels]
    assert any(name.startswith("attention") for name in names), names
    assert not any("matmul" in name or "softmax" in name for name in names), names


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("case", "is_inlined", "device"),
    [
        ("half", False, "gpu"),
        ("hidden_rows", True, "cpu"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("capped", True, "gpu"),
                ("hidden_rows", True, "gpu"),
                ("capped", True, "cpu"),
                ("mask_of_keys", False, "gpu"),
            )
        ),
    ],
)
def test_it_computes_what_onnxruntime_does(tmp_path: Path, case: str, is_inlined: bool, device: str) -> None:
    """The body, as onnxruntime's own kernel refuses masks of one row."""
    ort = pytest.importorskip("onnxruntime")
    body, artifact = network(case, is_inlined=True), tmp_path / "model.hyb"
    feeds = fed(body)
    wanted = ort.InferenceSession(body.SerializeToString()).run(None, feeds)[0].astype(np.float64)
    hybridc.compile(
        network(case, is_inlined=is_inlined), artifact, target="cuda:sm_86+avx2", machine="rtx-3090",
        plan_seconds=0.05, pins={"*": device},
    )  # fmt: skip
    with hybridc.load(artifact, emulate_gpu="64MiB") as session:
        (found,) = session.run(None, feeds)
    tolerance = 1e-5 if found.dtype == np.float32 else 4e-3
    np.testing.assert_allclose(
        found.astype(np.float64), wanted, rtol=0, atol=tolerance * np.abs(wanted).max()
    )
