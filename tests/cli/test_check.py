"""`hybridc check`: everything that would be refused, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx.parser

MODEL = """<ir_version: 10, opset_import: ["" : 20]>
g (int64[n] x) => (int64[1] y, float[k] z)
<int64[1] far = {2}> {
    y = GatherElements(x, far)
    z = TfIdfVectorizer <mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0, ngram_counts=[0],
        ngram_indexes=[0, 1], pool_int64s=[2, 3]>(x)
}"""
TAKEN = """<ir_version: 10, opset_import: ["" : 20]>
g (float[n, 2, 3, 3] x) => (float[n, 2, 3, 3] y) { y = Relu(x) }"""


def written(tmp_path: Path, text: str = MODEL) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def test_every_refusal_is_told_in_the_words_of_compile(cli: Any, tmp_path: Path) -> None:
    outcome = cli("check", written(tmp_path), "--dim", "n=2")
    assert outcome.code == 3
    assert outcome.out.count("error[HC") == 2 and outcome.out.endswith("2 refusals.\n")
    assert "error[HC114]: GatherElements has an index outside of [-2, 1]\n" in outcome.out
    assert "  --> net.onnx: TfIdfVectorizer: 'TfIdfVectorizer_1'\n" in outcome.out


def test_refusals_are_json_for_programs(cli: Any, tmp_path: Path) -> None:
    outcome = cli("check", written(tmp_path), "--json", "--target", "cuda+avx2")
    assert outcome.code == 3
    [refusal] = outcome.json()["refusals"]
    assert refusal == {
        "code": "HC111",
        "what": "input 'x' has unknown dimensions: n",
        "where": "net.onnx: input 'x'",
        "remedy": "fix them, for example --shape x=1 or --dim n=1",
    }


def test_a_model_that_is_taken(cli: Any, tmp_path: Path) -> None:
    path = written(tmp_path, TAKEN)
    outcome = cli("check", path, "--shape", "x=2x2x3x3", "--target", "avx2")
    assert (outcome.code, outcome.out) == (0, f"{path} is taken for avx2.\n")
    assert cli("check", path, "--shape", "x=2x2x3x3", "--json").json()["refusals"] == []


def test_a_model_that_is_missing_is_wrong_use(cli: Any, tmp_path: Path) -> None:
    outcome = cli("check", tmp_path / "absent.onnx")
    assert outcome.code == 2 and "HC530" in outcome.err
