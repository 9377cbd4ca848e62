"""`hybridc check`: everything that would be refused, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx.parser

MODEL = """<ir_version: 10, opset_import: ["" : 20]>
g (float[n, 2, 3, 3] x) => (float[n, 2, 3, 3] y, float[n, 2, 3, 3] z)
<float[2, 2, 1, 1] w = {1, 0, 0, 1}> {
    y = Mod(x, x)
    z = DeformConv(x, w, x)
}"""


def written(tmp_path: Path, text: str = MODEL) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def test_every_refusal_is_told_in_the_words_of_compile(cli: Any, tmp_path: Path) -> None:
    outcome = cli("check", written(tmp_path), "--dim", "n=2")
    assert outcome.code == 3
    assert outcome.out.count("error[HC") == 2 and outcome.out.endswith("2 refusals.\n")
    assert "error[HC114]: Mod of floating point numbers is supported with fmod=1 only\n" in outcome.out
    assert "  --> net.onnx: DeformConv: 'DeformConv_1'\n" in outcome.out


def test_refusals_are_json_for_programs(cli: Any, tmp_path: Path) -> None:
    outcome = cli("check", written(tmp_path), "--json", "--target", "cuda+avx2")
    assert outcome.code == 3
    [refusal] = outcome.json()["refusals"]
    assert refusal == {
        "code": "HC111",
        "what": "input 'x' has unknown dimensions: nx2x3x3",
        "where": "net.onnx: input 'x'",
        "remedy": "fix them, for example --shape x=1x2x3x3 or --dim n=1",
    }


def test_a_model_that_is_taken(cli: Any, tmp_path: Path) -> None:
    path = written(tmp_path, MODEL.replace("Mod(x, x)", "Relu(x)").replace("DeformConv(x, w, x)", "Exp(x)"))
    outcome = cli("check", path, "--shape", "x=2x2x3x3", "--target", "avx2")
    assert (outcome.code, outcome.out) == (0, f"{path} is taken for avx2.\n")
    assert cli("check", path, "--shape", "x=2x2x3x3", "--json").json()["refusals"] == []


def test_a_model_that_is_missing_is_wrong_use(cli: Any, tmp_path: Path) -> None:
    outcome = cli("check", tmp_path / "absent.onnx")
    assert outcome.code == 2 and "HC530" in outcome.err
