"""`--last-logits`: the logits of one token of each sequence, those that onnxruntime has of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc.cli import main
from hybridc.errors import UsageError
from hybridc.frontend import load_model
from hybridc.frontend.inputs.last_logits import with_last_logits
from tests.support.decoders import CONTEXT, VOCABULARY, appending, as_optimum, greedy, llama
from tests.support.machines import EAGER_GPU

PROMPT = [5, 17, 200, 3, 99, 42, 8, 150, 77, 31, 64]
CAPPED = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (int64[b,n] input_ids) => (float[b,n,7] logits) <float cap = {3.0}> {
      x = Gather (table, input_ids) y = MatMul (x, head) z = Div (y, cap) t = Tanh (z) logits = Mul (cap, t)
    }"""
READ_TWICE = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (int64[b,n] input_ids) => (float[b,n,7] logits, float[b,n,7] others)
    {
      x = Gather (table, input_ids) y = MatMul (x, head) others = Relu (y) logits = Tanh (y)
    }"""
MIXED = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (int64[b,n] input_ids) => (float[b,n,4] logits) {
      x = Gather (table, input_ids) logits = Softmax (x)
    }"""


@pytest.mark.parametrize(
    ("text", "reader"), [(CAPPED, "MatMul"), (READ_TWICE, ""), (MIXED, "")], ids=["capped", "twice", "mixed"]
)
def test_rows_are_those_of_all_logits(text: str, reader: str) -> None:
    """Taken in front of the head where nothing else reads what it makes."""
    random, model = np.random.default_rng(0), onnx.parser.parse_model(text)
    for name, shape in (("table", (7, 4)), ("head", (4, 7))):
        array = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    made = with_last_logits(load_model(model)).proto
    onnx.checker.check_model(made, full_check=True)
    (row,) = [node.output[0] for node in made.graph.node if node.op_type == "GatherND"]
    assert [node.op_type for node in made.graph.node if row in node.input] == ([reader] if reader else [])
    ids, last = random.integers(0, 7, (3, 5)), np.array([4, 0, 2])
    (wanted, *_), (found, *_) = (
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, feeds
        )
        for m, feeds in ((model, {"input_ids": ids}), (made, {"input_ids": ids, "last_token": last}))
    )
    np.testing.assert_array_equal(found, wanted[np.arange(3), last][:, None])


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("model", "dims", "on_gpu"),
    [
        (partial(llama, int4=False), {"sequence": [1, 8]}, False),
        (partial(llama, int4=False), {"sequence": [1, 8]}, True),
        (as_optimum, {"batch_size": 1, "sequence_length": [1, 8], "past_sequence_length": CONTEXT}, False),
        (appending, {"n": 1, "past": CONTEXT, "total": CONTEXT + 1}, False),
    ],
    ids=["places", "places on a GPU", "optimum", "one"],
)
def test_tokens_are_those_of_onnxruntime(
    model: Callable[[], onnx.ModelProto], dims: dict[str, Any], on_gpu: bool, tmp_path: Path
) -> None:
    """Runs for more tokens than are left, too, whose last ones are computed in vain."""
    path = tmp_path / "m.hyb"
    hybridc.compile(
        model(),
        path,
        target="cuda+avx2" if on_gpu else "avx2",
        dims=dims,
        last_logits=True,
        machine=EAGER_GPU,
        plan_seconds=0.1,
    )
    is_appending = model in (as_optimum, appending)
    reference = appending() if is_appending else model()
    wanted = list(islice(greedy(reference, PROMPT, in_places=not is_appending), 12))
    with hybridc.load_generation(path, emulate_gpu="64MiB" if on_gpu else None) as session:
        shape = next(node.shape for node in session._decoder.session.get_outputs() if node.name == "logits")
        assert shape == [1, 1, VOCABULARY]
        assert [token for (token,) in session.generate([PROMPT], 12)] == wanted


@pytest.mark.isa("avx2")
def test_sequences_may_have_different_numbers_of_new_tokens(tmp_path: Path) -> None:
    model = llama(batch=2, int4=False)
    parts = [[PROMPT[:3], PROMPT[:7]], [[4], [3]], [[7, 8], []]]
    found = []
    for last in (False, True):
        path = tmp_path / f"{last}.hyb"
        hybridc.compile(model, path, target="avx2", dims={"sequence": [1, 8]}, last_logits=last)
        with hybridc.load_generation(path) as session:
            found.append([session.append(part) for part in parts])
    for every, one in zip(*found, strict=True):
        np.testing.assert_allclose(one, every, rtol=0, atol=1e-5)


LAST = onnx.helper.make_tensor_value_info("last_token", onnx.TensorProto.INT64, [1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.opset_import[0].__setattr__("version", 11), "of opset 11"),
        (lambda m: m.graph.output[0].__setattr__("name", "scores"), "has not input_ids, and logits"),
        (lambda m: m.graph.input[0].__setattr__("name", "ids"), "has not input_ids, and logits"),
        (lambda m: m.graph.input.append(LAST), "has an input"),
    ],
)
def test_refusals(change: Callable[[onnx.ModelProto], None], text: str) -> None:
    model = llama()
    change(model)
    with pytest.raises(UsageError, match=text) as caught:
        hybridc.compile(model, target="avx2", last_logits=True, stop_after="import")
    assert caught.value.code == "HC539"


def test_command_refuses_a_model_without_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(hybridc.models.build("mlp"), tmp_path / "mlp.onnx")
    words = ["compile", str(tmp_path / "mlp.onnx"), "-o", str(tmp_path / "m.hyb"), "--target", "avx2"]
    assert main([*words, "--last-logits"]) == 2
    assert "error[HC539]: --last-logits is given" in capsys.readouterr().err
