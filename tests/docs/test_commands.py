"""Every command and Python block of the README and of the usage page works as written.

With small networks and little effort: files that the pages name are provided, and a table of substitutions
makes commands smaller without changing what they ask for.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.decoders import as_optimum

ROOT = Path(__file__).parents[2]
README, USAGE = ROOT / "README.md", ROOT / "docs" / "usage.md"
SMALLER = {
    "--gpu-memory": {"64MiB": "2MiB", "32MiB,64MiB,128MiB": "1MiB,2MiB,4MiB", "512MiB": "2MiB"},
    "--emulate-gpu": {"64MiB": "4MiB", "512MiB": "4MiB"},
    "--tune": {"60": "0.1"},
    "--plan-seconds": {"60": "0.05"},
    "--epochs": {"10": "1"},
}
"""Values of options that are made smaller."""
FEWER_LAYERS = ["--param", "layers=1", "--param", "hidden=64", "--param", "heads=2", "--param", "kv_heads=2"]
SMALLER_MODELS = {"llama_7b": [*FEWER_LAYERS, "--param", "feed_forward=96", "--param", "vocabulary=100"]}
"""Parameters that make a model smaller."""
LESS_EFFORT = {command: ["--plan-seconds", "0.05"] for command in ("compile", "plan", "sweep", "compare")}
RUNS_ELSEWHERE = re.compile(
    r"make |\. \.venv|machine calibrate|pip install|hybridc sign|hybridc serve|--trust|completion"
)
"""Run by the continuous integration itself, or by tests of their own."""
SHAPE = (1, 8, 16, 16)
PREPARED = f"""
import numpy as np
import onnx
from hybridc import emulator
emulator.start(1 << 30)
image = np.zeros({SHAPE}, np.float32)
images, labels = np.zeros((100, 3, 32, 32), np.float32), np.zeros(100, np.int64)
"""
"""What the Python blocks count on."""


def blocks(document: Path) -> list[str]:
    """Indented blocks outside of the parts that programs write."""
    text = re.sub(r"<!-- example:.*?<!-- end of example -->", "", document.read_text(), flags=re.DOTALL)
    return [
        "\n".join(line[4:] for line in block.splitlines())
        for block in re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    ]


def commands(document: Path) -> list[list[str]]:
    """The words of each command, without comments."""
    lines = [line for block in blocks(document) for line in block.splitlines()]
    return [
        shlex.split(line, comments=True)
        for line in lines
        if line.startswith("hybridc ") and not RUNS_ELSEWHERE.search(line)
    ]


def scripts(document: Path) -> list[str]:
    return [block for block in blocks(document) if "hybridc.compile" in block and "    hybridc " not in block]


def run(folder: Path, *words: str) -> str:
    environment = os.environ | {"HYBRIDC_TRACEBACK": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def small(words: list[str]) -> list[str]:
    """A command with smaller values, and on an emulated GPU, as the pages say where there is none."""
    made = [
        SMALLER.get(before, {}).get(word, word) for before, word in zip(["", *words], words, strict=False)
    ]
    if made[1] in LESS_EFFORT and not made[2].endswith(".hyb") and "--plan-seconds" not in made:
        made += LESS_EFFORT[made[1]]
    if made[1:3] == ["models", "export"]:
        made += SMALLER_MODELS.get(made[3], [])
    if made[1] in ("run", "bench"):
        made += ["--emulate-gpu", "4MiB"]
    return made[1:]


def write_model(path: Path) -> None:
    """Twelve equal convolutions, named as ResNet-50's are."""
    weights = np.random.default_rng(0).standard_normal((8, 8, 3, 3)).astype(np.float32) / 8
    names = ["x", *(f"y{i}" for i in range(11)), "logits"]
    nodes = [
        helper.make_node("Conv", [names[i], f"w{i}"], [names[i + 1]], f"Conv_{i}", pads=[1, 1, 1, 1])
        for i in range(12)
    ]
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, SHAPE) for name in ("x", "logits")]
    arrays = [onnx.numpy_helper.from_array(weights, f"w{i}") for i in range(12)]
    graph = helper.make_graph(nodes, "small", ports[:1], ports[1:], arrays)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def write_quantized_model(path: Path) -> None:
    """A matrix product of 8-bit numbers, as quantizers write it."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["data"]),
        helper.make_node("DequantizeLinear", ["w", "scale", "signed_zero"], ["weight"]),
        helper.make_node("MatMul", ["data", "weight"], ["y"]),
    ]
    arrays = {
        "scale": np.float32(0.02),
        "zero": np.uint8(128),
        "signed_zero": np.int8(0),
        "w": np.random.default_rng(0).integers(-127, 128, (64, 32), np.int8),
    }
    initializers = [onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in arrays.items()]
    ports = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [16, width])
        for name, width in (("x", 64), ("y", 32))
    ]
    graph = helper.make_graph(nodes, "quantized", ports[:1], ports[1:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("own_cache")
def test_commands_of_the_readme(tmp_path: Path, command: Callable[[list[str]], str]) -> None:
    write_model(tmp_path / "model.onnx")
    ran = []
    for words in commands(README):
        ran.append(words[1])
        command(small(words))
    assert ran == ["check", "plan", "compile", "run"] and list((tmp_path / "outputs").glob("*.npy"))
    [script] = scripts(README)
    run(tmp_path, "-c", PREPARED + script)


def test_example_of_the_readme_is_a_command_with_its_output() -> None:
    [example] = re.findall(r"<!-- example:.*?\n((?: {4}.*\n|\n)+)", README.read_text())
    command, _, table = example.strip().partition("\n")
    assert shlex.split(command)[:2] == ["hybridc", "plan"]
    assert all(heading in table for heading in ("Kernels (", "Placement", "Predicted run: "))


def test_every_line_of_the_pages_is_run_or_known() -> None:
    """No command hides in a block that these tests do not read."""
    for document in (README, USAGE):
        lines = re.findall(r"^ {4}(\S+) .*$", document.read_text(), re.MULTILINE)
        known = {"hybridc", "make", "import", "with"}
        written = [word for word in lines if word in ("pip", "python", "python3", "bash")]
        assert written == [] and known & set(lines)


_OF_OTHER_TESTS = {
    *("quantized.onnx", "cifar_quick", "step.hyb", "open.onnx", "open.hyb", "encoder.hyb"),
    *("fp16", "bf16", "tf32", "llama.onnx", "llama.hyb", "model.onnx"),
}
"""Words of the usage page's commands that the next tests run."""


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("own_cache")
def test_commands_of_the_usage_page(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    write_model(tmp_path / "resnet50.onnx")
    ran = set()
    for words in commands(USAGE):
        if words[1:3] == ["models", "export"] and words[3] == "resnet50":
            words = [*words[:4], "exported.onnx", "--param", "width=4"]
        elif _OF_OTHER_TESTS & set(words):
            continue  # the next tests
        run(tmp_path, "-m", "hybridc.cli", *small(words))
        ran.add(words[1])
    assert {"compile", "plan", "explain", "run", "bench", "bundle", "compare", "sweep"} <= ran
    script = next(block for block in scripts(USAGE) if "resnet50" in block)
    run(tmp_path, "-c", PREPARED + script)


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("own_cache")
def test_language_models_of_the_usage_page(tmp_path: Path) -> None:
    onnx.save(as_optimum(), tmp_path / "model.onnx")
    ran = [words for words in commands(USAGE) if {"llama.onnx", "llama.hyb", "model.onnx"} & set(words)]
    assert [words[1] for words in ran] == ["models", "compile", "generate", "compile"]
    smaller = ["--param", "vocabulary=300", "--param", "context=64"]
    for words in ran:
        run(tmp_path, "-m", "hybridc.cli", *small(words), *(smaller if words[1] == "models" else []))
    [script] = [block for block in scripts(USAGE) if "llama.onnx" in block]
    printed = run(tmp_path, "-c", script).split()
    assert len(printed) == 16 and all(0 <= int(token) < 300 for token in printed)


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("own_cache")
def test_open_dimensions_of_the_usage_page(tmp_path: Path) -> None:
    shape: list[str | int] = ["batch", "seq", 4]
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["y"], axis=1)], "open", ports[:1], ports[1:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "open.onnx")
    ran = [words for words in commands(USAGE) if {"open.onnx", "open.hyb"} & set(words)]
    assert [words[1] for words in ran] == ["compile", "run", "plan", "plan"]
    for words in ran:
        run(tmp_path, "-m", "hybridc.cli", *small(words))
    [script] = [block for block in scripts(USAGE) if "open.onnx" in block]
    run(tmp_path, "-c", "import numpy as np\nimport hybridc\nx = np.zeros((3, 9, 4), np.float32)\n" + script)


@pytest.mark.slow
@pytest.mark.isa("avx512_bf16")
@pytest.mark.usefixtures("own_cache")
def test_reduced_precision_of_the_usage_page(tmp_path: Path) -> None:
    write_model(tmp_path / "net.onnx")
    write_quantized_model(tmp_path / "quantized.onnx")
    narrow = [words for words in commands(USAGE) if "--precision" in words]
    assert {words[-1] for words in narrow} >= {"bf16", "fp16", "tf32"}
    for words in narrow:
        run(tmp_path, "-m", "hybridc.cli", *small(words))


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("own_cache")
def test_training_of_the_usage_page(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    (tmp_path / "cifar-10").mkdir()
    records = generator.integers(0, 255, (200, 3073), np.uint8)
    records[:, 0] %= 10
    for name in ("data_batch_1.bin", "test_batch.bin"):
        records.tofile(tmp_path / "cifar-10" / name)
    for name in ("train.npz", "val.npz"):
        x = generator.standard_normal((100, 3, 32, 32), np.float32)
        np.savez(tmp_path / name, x=x, y=generator.integers(0, 10, 100))
    for words in commands(USAGE):
        if {"cifar_quick", "step.hyb"} & set(words):
            run(tmp_path, "-m", "hybridc.cli", *small(words))
    [script] = [block for block in scripts(USAGE) if "compile_training" in block]
    run(tmp_path, "-c", PREPARED + "import hybridc\n" + script)
    onnx.checker.check_model(tmp_path / "trained.onnx")
