"""Damaged ONNX files: each is refused by name, or planned, or computes what onnxruntime computes.

python -m tests.fuzz.models --minutes 20 --seed 1
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from random import Random

import ml_dtypes
import numpy as np
import onnx
import onnx.parser

import hybridc
from hybridc.compiler import compile_model, plan_model
from hybridc.options import CompileOptions
from hybridc.results import Planned
from hybridc.targets import parse_target
from tests.fuzz.driver import Harness, Outcome, Verdict, main
from tests.support.onnx_mutations import mutated

RUN_SHARE = 0.25
"""Of the models that can be planned: code for one takes about as long as planning ten."""
LARGEST_RUN_BYTES = 1 << 26
LARGEST_RUN_FLOPS = 10**9
"""A model that asks for more is planned only: what is wrong with it would show in a smaller one, too."""
TOLERANCE = 1e-3
"""Of the largest number of a result: damaged weights are of any size, so much cancels."""

_NETWORKS = {
    "convolutions": """
        g (float[1,3,8,8] x) => (float[1,2] y)
        <float[4,3,3,3] w = {%108}, float[4] b = {1,2,3,4}, float[4] s = {1,1,1,2}, float[4] m = {0,1,0,1},
         float[4] v = {1,2,1,1}, float[2,4,1,1] u = {1,2,3,4,5,6,7,8}> {
            c = Conv <pads=[1,1,1,1], strides=[2,2]> (x, w, b)
            n = BatchNormalization <epsilon=0.001> (c, s, b, m, v)
            r = Relu (n)
            p = MaxPool <kernel_shape=[2,2], strides=[2,2]> (r)
            q = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1]> (p)
            d = Conv <group=1> (q, u)
            a = GlobalAveragePool (d)
            y = Flatten (a)
        }""",
    "products": """
        g (float[2,8] x) => (float[2,3] y)
        <float[8,6] w = {%48}, float[6] b = {1,2,3,4,5,6}, float[6,3] v = {%18}, float[3] c = {0,1,2}> {
            h = Gemm <alpha=0.5, beta=2.0> (x, w, b)
            t = Tanh (h)
            e = Clip (t)
            m = MatMul (e, v)
            a = Add (m, c)
            y = Softmax <axis=-1> (a)
        }""",
    "shapes": """
        g (float[2,3,4] x) => (float[4,2,6] y, int64[1] n)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[3] reps = {1,1,2}, int64[1] minus = {-1},
         int64[2] starts = {0,1}, int64[2] ends = {2,9}, int64[2] axes = {0,2},
         int64[6] pads = {0,0,1,0,0,0}> {
            s = Shape (x)
            last = Gather <axis=0> (s, one)
            shape = Concat <axis=0> (zero, last, minus)
            r = Reshape (x, shape)
            t = Transpose <perm=[2,0,1]> (r)
            c = Slice (r, starts, ends, axes)
            f = Pad (c, pads)
            u = Tile (t, reps)
            y = Add (u, u)
            n = Shape <start=1, end=2> (f)
        }""",
    "attention": """
        g (float[1,4,6] x, bool[1,4] mask) => (float[1,4,6] y)
        <float[6,6] wq = {%36}, float[6,6] wk = {%36}, float[6,6] wv = {%36}, float scale = {0.4},
         float[1] low = {-100.0}, int64[1] axis = {1}, float[6] g1 = {1,1,1,1,1,2},
         float[6] g2 = {0,0,0,0,0,1}> {
            q = MatMul (x, wq)
            k = MatMul (x, wk)
            v = MatMul (x, wv)
            kt = Transpose <perm=[0,2,1]> (k)
            qk = MatMul (q, kt)
            sc = Mul (qk, scale)
            m = Unsqueeze (mask, axis)
            w = Where (m, sc, low)
            p = Softmax <axis=-1> (w)
            o = MatMul (p, v)
            r = Add (o, x)
            y = LayerNormalization <axis=-1, epsilon=0.001> (r, g1, g2)
        }""",
    "reductions": """
        g (float[3,5] x) => (float[3,1] y, int64[3] i, float[3,2] t, int64[3,2] k, float[3,5] c)
        <int64[1] axes = {1}, int64[1] two = {2}, int64 axis = {1}, float[5] e = {1,2,3,4,5}> {
            m = ReduceMean <keepdims=1> (x, axes)
            d = Sub (x, m)
            q = Pow (d, e)
            s = ReduceSum <keepdims=1> (q, axes)
            y = Sqrt (s)
            i = ArgMax <axis=1, keepdims=0> (x)
            t, k = TopK <axis=1, largest=1, sorted=1> (x, two)
            c = CumSum (x, axis)
        }""",
    "integers": """
        g (int32[4] x, uint8[2,3] b) => (int32[4] y, float[2,3] z, bool[4] o)
        <int32[4] d = {3,1,-2,5}, int32 one = {1}, float scale = {0.1}, uint8 zero = {3},
         int32[2] at = {0,3}> {
            a = Mul (x, d)
            m = Mod (a, d)
            s = Div (a, d)
            g = Gather <axis=0> (s, at)
            c = Concat <axis=0> (g, g)
            y = Add (m, c)
            o = Greater (y, one)
            z = DequantizeLinear (b, scale, zero)
        }""",
    "constants": """
        g (float[2,2] x) => (float[2,2] y, float[2,4] z)
        {
            k = Constant <value = float[2,2] {1,2,3,4}> ()
            n = Constant <value_ints = [2,4]> ()
            f = ConstantOfShape <value = float[1] {0.5}> (n)
            h = Constant <value_float = 2.0> ()
            a = Mul (x, k)
            y = Add (a, h)
            s, t = Split <axis=1, num_outputs=2> (f)
            z = Concat <axis=1> (y, s)
        }""",
    "resizing": """
        g (float[1,2,4,4] x) => (float[1,2,8,8] y, float[1,1,8,8] u)
        <float[4] scales = {1,1,2,2}, float[2,1,2,2] w = {1,2,3,4,5,6,7,8}, float[2] s = {1,2},
         float[2] b = {0,1}> {
            r = Resize <mode="linear"> (x, scales)
            i = InstanceNormalization (r, s, b)
            l = LeakyRelu <alpha=0.1> (i)
            y = HardSigmoid (l)
            u = ConvTranspose <strides=[2,2]> (x, w)
        }""",
    "functions": """
        g (float[2,3] x) => (float[2,3] y)
        <float[3] w = {1,2,3}> {
            a = local.scaled <alpha=2.0> (x, w)
            y = local.scaled <alpha=3.0> (a, w)
        }
        <domain: "local", opset_import: ["" : 18]>
        scaled <alpha> (p, q) => (r) {
            s = Mul (p, q)
            r = Elu <alpha: float = @alpha> (s)
        }""",
}


@cache
def networks() -> dict[str, onnx.ModelProto]:
    """Small networks of the operators whose attributes and constant operands say most."""
    return {name: _parsed(text) for name, text in _NETWORKS.items()}


def _parsed(text: str) -> onnx.ModelProto:
    head = '<ir_version: 8, opset_import: ["" : 18, "local" : 1]>'
    pieces = text.split("%")
    whole = pieces[0]
    for piece in pieces[1:]:  # `{%12}`: twelve weights
        count = piece.split("}")[0]
        values = ",".join(f"{math.sin(i):.3f}" for i in range(int(count)))
        whole += values + piece[len(count) :]
    return onnx.parser.parse_model(head + whole)


def check(random: Random, folder: Path) -> Verdict:
    """A damaged model is planned; some of those that can be are compiled and run."""
    data = mutated(random.choice(list(networks().values())), random)
    path = folder / "model.onnx"
    path.write_bytes(data)
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 4)
    options = CompileOptions(target=parse_target(random.choice(("avx2", "avx2", "cuda+avx2"))))
    planned = plan_model(path, options)
    if random.random() > RUN_SHARE or options.target.has_gpu or _is_large(planned):
        return Verdict(Outcome.ACCEPTED)
    compile_model(path, folder / "model.hyb", options)
    with hybridc.load(folder / "model.hyb") as session:
        manifest = session.artifact.manifest
        feeds = {port.name: _feed(port.shape, port.dtype) for port in manifest.inputs}
        names = list(dict.fromkeys(port.name for port in manifest.outputs))
        results = session.run(names, feeds)
    return _compared(path, feeds, dict(zip(names, results, strict=True)))


def _is_large(planned: Planned) -> bool:
    graph = planned.graphs[0]
    size_bytes = sum(tensor.size_bytes for tensor in graph.tensors)
    return size_bytes > LARGEST_RUN_BYTES or sum(k.flops for k in graph.kernels) > LARGEST_RUN_FLOPS


def _feed(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(shape)
    if dtype == "bool":
        return values > 0
    if "int" in dtype:
        return (np.abs(values) * 2 + 1).astype(dtype)  # a divisor that is fed is not zero
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _compared(path: Path, feeds: dict[str, np.ndarray], results: dict[str, np.ndarray]) -> Verdict:
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    declared = onnx.load(path, load_external_data=False)
    for value in (*declared.graph.output, *declared.graph.value_info):
        value.type.tensor_type.ClearField("shape")  # onnxruntime folds Shape by a wrong one
    onnx.save(declared, path)
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        expected = session.run(list(results), feeds)
    except Exception as error:  # of any kind: it has refused the model
        return Verdict(Outcome.ACCEPTED, str(error))
    for (name, result), reference in zip(results.items(), expected, strict=True):
        if difference := _difference(result, np.asarray(reference)):
            return Verdict(Outcome.WRONG, f"{name}: {difference}")
    return Verdict(Outcome.RIGHT)


def _difference(result: np.ndarray, reference: np.ndarray) -> str:
    """What is different, or nothing."""
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return f"{result.dtype}{result.shape} instead of {reference.dtype}{reference.shape}"
    if result.dtype.kind in "iub":
        return (
            "" if np.array_equal(result, reference) else f"{result.ravel()[:9]} not {reference.ravel()[:9]}"
        )
    wide, exact = result.astype(np.float64), reference.astype(np.float64)
    scale = np.abs(exact[np.isfinite(exact)]).max(initial=1e-6)
    if np.allclose(wide, exact, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True):
        return ""
    return f"{result.ravel()[:9]} instead of {reference.ravel()[:9]}"


HARNESS = Harness("models", check, seconds=60)

if __name__ == "__main__":
    raise SystemExit(main(HARNESS))
