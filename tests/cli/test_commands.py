"""Each command with a pretended compiler and runtime: what it passes on, prints and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridc.options import Budget

MIB = 1024**2


def test_fast_algorithms_can_be_turned_off(cli: Any, fakes: Any, model: Path) -> None:
    for words in ((), ("--no-fast-algorithms",), ("--no-winograd",)):  # the last is the old name
        assert cli("plan", model, *words).code == 0
    assert [options.fast_algorithms for options in fakes.options] == [True, False, False]
    assert "--no-winograd" not in cli("plan", "-h").out


def test_activations_of_8_bits_can_be_turned_off(cli: Any, fakes: Any, model: Path) -> None:
    for words in ((), ("--no-int8-activations",)):
        assert cli("plan", model, *words).code == 0
    assert [options.int8_activations for options in fakes.options] == [True, False]


def test_compile_passes_its_options_on(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    words = "--target cuda:sm_90+avx2 --gpu-memory 50% --threads 2 --shape x=1x3 --shape y:0=2 --dim N=4"
    outcome = cli(
        "compile",
        model,
        "-o",
        tmp_path / "o.hyb",
        *words.split(),
        "--machine",
        "h100",
        "--dump-ir",
        tmp_path / "ir",
    )
    assert outcome.code == 0
    (options,) = fakes.options
    assert str(options.target) == "cuda:sm_90+avx2"
    assert options.gpu_memory == (Budget(percent=50.0),)
    assert options.shapes == (("x", (1, 3)), ("y:0", (2,)))
    assert options.dims == (("N", 4),)
    assert (options.machine.name, options.threads, options.dump_ir) == ("h100", 2, tmp_path / "ir")


def test_compile_summary(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    out = cli("compile", model, "-o", tmp_path / "o.hyb", "--target", "cuda+avx2", "--gpu-memory", "1MiB").out
    assert "2 kernels (1 distinct function), compiled in 1.5 s, 53 of 56 functions from the cache\n" in out
    assert "gpu: 1 kernel, memory 512 B of 1.00 MiB, lower bound 512 B" in out
    assert "2 copies of 48 B" in out


def test_summary_of_a_compilation_without_the_cache_does_not_speak_of_it(
    cli: Any, fakes: Any, model: Path, tmp_path: Path
) -> None:
    words = ("compile", model, "-o", tmp_path / "o.hyb", "--target", "avx2", "--no-cache")
    assert "compiled in 1.5 s\n" in cli(*words).out
    assert cli(*words, "--json").json()["cache"] is None
    assert [options.cache for options in fakes.options] == [False, False]


def test_compile_json(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    data = cli(
        "compile", model, "-o", tmp_path / "o.hyb", "--target", "cuda+avx2", "--gpu-memory", "1MiB", "--json"
    ).json()
    assert (data["kernels"], data["functions"], data["copies"], data["copied_bytes"]) == (2, 1, 2, 48)
    assert data["budget_bytes"] == MIB
    assert data["devices"][0]["peak_bytes"] == 512
    assert data["seconds"] == {"import": 0.5, "link": 1.0}
    assert data["cache"] == {"found": 53, "functions": 56}
    assert data["cuda_image_bytes"] == 262 << 10


def test_compile_with_several_budgets(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    words = (
        "compile",
        model,
        "-o",
        tmp_path / "o.hyb",
        "--target",
        "cuda+avx2",
        "--gpu-memory",
        "50%,1MiB,4MiB",
    )
    out = cli(*words, "--host-memory", "1GiB").out
    assert "plan for 1.00 MiB of GPU memory:\n  gpu: 1 kernel, memory 512 B of 1.00 MiB" in out
    assert out.count("predicted run: 10.0 us, within 25.0% of the bound") == 2
    assert [str(b) for b in fakes.options[0].gpu_memory] == ["50%", "1.00 MiB", "4.00 MiB"]
    assert fakes.options[0].host_memory_bytes == 1024 * MIB
    data = cli(*words, "--json").json()
    assert [plan["budget_bytes"] for plan in data["plans"]] == [MIB, 4 * MIB]
    assert data["budget_bytes"] == 4 * MIB


def test_run_chooses_by_gpu_memory(cli: Any, fakes: Any, artifact: Path) -> None:
    cli("run", artifact, "--random")
    cli("run", artifact, "--random", "--gpu-memory", "1MiB", "--host-memory", "2MiB")
    chosen = [(c["gpu_memory_bytes"], c["host_memory_bytes"]) for c in fakes.choices]
    assert chosen == [(None, None), (MIB, 2 * MIB)]
    assert "not a percentage" in cli("run", artifact, "--gpu-memory", "50%").err


@pytest.mark.parametrize("budgets", ["", "1MiB,", "1MiB,,2MiB", "1MiB;2MiB"])
def test_list_of_budgets_that_is_none_is_refused(cli: Any, model: Path, budgets: str) -> None:
    outcome = cli("compile", model, "-o", "o.hyb", "--gpu-memory", budgets)
    assert outcome.code == 2 and "error[HC510]" in outcome.err


def test_compile_tunes_for_the_time_it_is_given(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    place = ("compile", model, "-o", tmp_path / "o.hyb")
    out = [cli(*place, *more).out for more in ((), ("--tune",), ("--tune=2.5", "--tune-record", record))]
    assert [o.tune_seconds for o in fakes.options] == [None, 60.0, 2.5]
    assert [o.tune_record for o in fakes.options] == [None, None, record]
    assert ["1 function with a faster tile found by tuning" in text for text in out] == [0, 1, 1]
    assert cli(*place, "--tune", "--json").json()["tuned"] == {"f": "8x3"}


def test_compile_does_not_take_the_model_for_a_time(cli: Any, model: Path) -> None:
    outcome = cli("compile", "--tune", model, "-o", "o.hyb")
    assert (outcome.code, "HC518" in outcome.err, "--tune=60" in outcome.err) == (2, True, True)


def test_compile_stops_after_a_stage(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    outcome = cli("compile", model, "-o", tmp_path / "o.hyb", "--target", "avx2", "--stop-after", "fuse")
    assert fakes.options[0].stop_after == "fuse"
    assert outcome.out == "stopped after fuse; no artifact was written\n"


def test_compile_needs_an_output_only_where_it_goes_to_the_end(cli: Any, fakes: Any, model: Path) -> None:
    assert cli("compile", model, "--target", "avx2", "--stop-after", "fuse").code == 0
    refused = cli("compile", model, "--target", "avx2")
    assert refused.code == 2 and "give -o OUT.hyb" in refused.err
    assert "error[HC522]: missing output path" in refused.err, "the code that hybridc.compile() gives, too"


def test_compile_of_an_artifact_asks_for_its_model(cli: Any, artifact: Path, tmp_path: Path) -> None:
    outcome = cli("compile", artifact, "-o", tmp_path / "o.hyb")
    assert outcome.code == 2 and "it is a compiled artifact" in outcome.err


def test_compile_refuses_to_replace_what_is_no_artifact(
    cli: Any, fakes: Any, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").touch()
    for output in (model, tmp_path / "precious"):
        outcome = cli("compile", model, "-o", output)
        assert outcome.code == 2 and "is not a compiled artifact" in outcome.err
    assert fakes.options == []


def test_compile_says_at_once_that_its_output_cannot_be_written(cli: Any, fakes: Any, model: Path) -> None:
    outcome = cli("compile", model, "-o", model / "o.hyb", "--tune=60")
    assert outcome.code == 2 and "error[HC562]" in outcome.err and "choose another location" in outcome.err
    assert fakes.options == []


def test_compile_replaces_an_artifact(cli: Any, fakes: Any, model: Path, artifact: Path) -> None:
    assert cli("compile", model, "-o", artifact, "--target", "avx2").code == 0


@pytest.mark.parametrize("budget", ["64", "lots", "-3MiB"])
def test_compile_refuses_a_wrong_budget(cli: Any, fakes: Any, model: Path, budget: str) -> None:
    outcome = cli("compile", model, "-o", "o.hyb", f"--gpu-memory={budget}")
    assert outcome.code == 2 and "error[HC510]" in outcome.err


def test_compile_refuses_an_unknown_machine(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    outcome = cli("compile", model, "-o", tmp_path / "o.hyb", "--machine", "lptop-4gb")
    assert outcome.code == 2 and "laptop-4gb" in outcome.err


def test_plan_of_a_model(cli: Any, fakes: Any, model: Path) -> None:
    out = cli("plan", model, "--target", "cuda+avx2", "--gpu-memory", "50%").out
    assert out.startswith(f"Plan of {model} for cuda+avx2 on laptop-4gb\n")
    assert "4.00 MiB" in out and "the smallest budget that works is 1.001MiB" in out


def test_plan_json(cli: Any, fakes: Any, model: Path) -> None:
    data = cli("plan", model, "--target", "cuda+avx2", "--gpu-memory", "50%", "--json").json()
    assert data["schema_version"] == 1
    assert (data["budget_bytes"], data["all_gpu_peak_bytes"]) == (4 * MIB, 8 * MIB)
    assert [row["device"] for row in data["kernels"]] == ["cpu", "gpu"]
    assert [row["target"] for row in data["copies"]] == ["gpu", "cpu"]


def test_plan_for_several_budgets(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    words = ("plan", model, "--target", "cuda+avx2", "--gpu-memory", "50%,25%")
    out = cli(*words).out
    assert out.index("budget 2.00 MiB\n") < out.index("budget 4.00 MiB\n")
    data = cli(*words, "--json").json()
    assert [plan["budget_bytes"] for plan in data["plans"]] == [2 * MIB, 4 * MIB]
    assert data["budget_bytes"] == 4 * MIB, "the figures beside them are those of the largest"
    refused = cli(*words, "--html", tmp_path / "p.html")
    assert refused.code == 2 and "give a single budget" in refused.err
    assert list(tmp_path.glob("*.html")) == []


def test_plan_of_an_artifact_tells_of_its_gpu_code(cli: Any, fakes: Any, artifact: Path) -> None:
    out = cli("plan", artifact).out
    assert out.startswith(f"Plan of {artifact}, with 262.0 KiB of GPU code for sm_75, sm_90 and newer\n")
    data = cli("plan", artifact, "--json").json()
    assert data["cuda"] == {"architectures": ["sm_75", "sm_90"], "image_bytes": 262 << 10}


def test_plans_of_an_artifact_for_several_budgets(cli: Any, fakes: Any, artifact: Path) -> None:
    fakes.artifact_budgets = (MIB, 2 * MIB, 3 * MIB)
    data = cli("plan", artifact, "--gpu-memory", "3.5MiB,1MiB", "--json").json()
    assert [plan["budget_bytes"] for plan in data["plans"]] == [MIB, 3 * MIB]


def test_plan_spends_effort_on_bounds_where_it_is_asked_to(cli: Any, fakes: Any, model: Path) -> None:
    words = ("plan", model, "--target", "cuda+avx2")
    assert cli(*words).code == cli(*words, "--bound-seconds", "2.5").code == 0
    assert fakes.bound_seconds == [None, 2.5]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "long"])
def test_plan_refuses_an_impossible_effort(cli: Any, fakes: Any, model: Path, seconds: str) -> None:
    outcome = cli("plan", model, "--target", "cuda+avx2", f"--bound-seconds={seconds}")
    assert outcome.code == 2 and "error[HC518]" in outcome.err


def test_plan_of_an_artifact_has_the_bound_it_was_stored_with(cli: Any, fakes: Any, artifact: Path) -> None:
    outcome = cli("plan", artifact, "--bound-seconds", "1")
    assert outcome.code == 2 and "error[HC516]" in outcome.err


def test_plan_of_an_artifact(cli: Any, fakes: Any, artifact: Path) -> None:
    outcome = cli("plan", artifact, "--json")
    assert outcome.json()["budget_bytes"] == MIB
    assert outcome.json()["all_gpu_peak_bytes"] is None


def test_plan_of_an_artifact_is_one_of_those_it_has(cli: Any, fakes: Any, artifact: Path) -> None:
    fakes.artifact_budgets = (MIB, 2 * MIB)
    assert cli("plan", artifact, "--json").json()["budget_bytes"] == 2 * MIB
    chosen = cli("plan", artifact, "--gpu-memory", "1.5MiB")
    assert chosen.out.startswith(f"Plan of {artifact}, 1 of 2, for the budgets 1MiB, 2MiB, with 262.0 KiB")
    refused = cli("plan", artifact, "--gpu-memory", "1000kB")
    assert refused.code == 2 and "error[HC558]" in refused.err and "1MiB, 2MiB" in refused.err
    assert "not a percentage" in cli("plan", artifact, "--gpu-memory", "50%").err


def test_plan_of_an_artifact_takes_no_options_of_planning(cli: Any, fakes: Any, artifact: Path) -> None:
    outcome = cli("plan", artifact, "--plan-seconds", "1")
    assert outcome.code == 2 and "plans are fixed" in outcome.err
    outcome = cli("plan", artifact, "--dim", "N=1")
    assert outcome.code == 2 and "all its sizes are fixed" in outcome.err


@pytest.mark.parametrize(
    "words", ["--plan-seconds 10", "--rounding-error 0.5", "--target native", "--threads 2"]
)
def test_plan_of_an_artifact_ignores_no_option(cli: Any, fakes: Any, artifact: Path, words: str) -> None:
    outcome = cli("plan", artifact, *words.split())
    assert outcome.code == 2 and "error[HC516]" in outcome.err


def test_run_reads_and_writes_arrays(cli: Any, fakes: Any, artifact: Path, tmp_path: Path) -> None:
    array = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)
    np.save(tmp_path / "x.npy", array)
    outcome = cli(
        "run", artifact, "--input", f"in=x={tmp_path / 'x.npy'}", "--output", tmp_path / "a" / "b", "--json"
    )
    (output,) = outcome.json()["outputs"]
    assert (output["name"], output["shape"], output["dtype"]) == ("../y/0", [2, 3], "float32")
    assert Path(output["path"]).parent == tmp_path / "a" / "b"
    np.testing.assert_array_equal(np.load(output["path"]), np.maximum(array, 0))
    assert outcome.json()["memory"]["gpu"]["allocated_bytes"] == 512
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["_y_0.npy"]


def test_run_prints_what_it_did(cli: Any, fakes: Any, artifact: Path) -> None:
    out = cli("run", artifact, "--random", "--repeat", 3).out
    assert "../y/0: float32 2x3\n" in out and "3 runs: " in out and "at the median" in out
    assert "gpu memory: 512 B planned, 512 B allocated" in out


def test_run_draws_the_same_inputs_from_the_same_seed(
    cli: Any, fakes: Any, artifact: Path, tmp_path: Path
) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert cli("run", artifact, "--random", "--seed", seed, "--output", tmp_path / folder).code == 0
    a, b, c = (np.load(tmp_path / folder / "_y_0.npy") for folder in "abc")
    assert np.array_equal(a, b) and not np.array_equal(a, c)


def test_run_starts_the_emulator_with_the_given_size(cli: Any, fakes: Any, artifact: Path) -> None:
    outcome = cli("run", artifact, "--random", "--emulate-gpu", "64MiB", "--json")
    assert fakes.emulated_bytes == [64 * MIB]
    assert outcome.json()["emulated_peak_bytes"] == 768
    assert "emulated GPU: 768 B" in cli("run", artifact, "--random", "--emulate-gpu", "64MiB").out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "no value for 'in=x'"),
        (["--input", "x"], "invalid input 'x'"),
        (["--input", "inx=x.npy"], "did you mean 'in=x'?"),
        (["--random", "--emulate-gpu", "50%"], "not a percentage"),
        (["--random", "--emulate-gpu", "0B"], "invalid GPU size"),
        (["--random", "--seed", "-1"], "invalid seed"),
        (["--random", "--repeat", "0"], "at least 1"),
    ],
)
def test_run_refuses_wrong_inputs(cli: Any, fakes: Any, artifact: Path, argv: list[str], text: str) -> None:
    outcome = cli("run", artifact, *argv)
    assert outcome.code == 2 and text in outcome.err


def test_run_of_a_model_says_to_compile_it(cli: Any, fakes: Any, model: Path) -> None:
    outcome = cli("run", model, "--random")
    assert outcome.code == 2 and f"hybridc compile {model} -o network.hyb" in outcome.err


def test_models_list(cli: Any) -> None:
    listed = cli("models", "list", "--json").json()
    assert {"resnet", "unet", "bert"} <= {model["name"] for model in listed}
    assert "resnet" in cli("models", "list").out


def test_models_export(cli: Any, tmp_path: Path) -> None:
    data = cli(
        "models", "export", "mlp", tmp_path / "new" / "mlp.onnx", "--param", "hidden=8", "--json"
    ).json()
    assert data["parameters"] == {"hidden": 8}
    assert data["size_bytes"] == (tmp_path / "new" / "mlp.onnx").stat().st_size
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mlp.onnx"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["rsnet"], "resnet"),
        (["mlp", "--param", "hiden=8"], "hidden"),
        (["mlp", "--param", "hidden=many"], "of type int"),
        (["mlp", "--param", "hidden"], "KEY=VALUE"),
    ],
)
def test_models_export_refuses(cli: Any, tmp_path: Path, argv: list[str], text: str) -> None:
    outcome = cli("models", "export", argv[0], tmp_path / "m.onnx", *argv[1:])
    assert outcome.code == 2 and text in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_machine_show(cli: Any) -> None:
    data = cli("machine", "show", "h100", "--json").json()
    assert data["profile"]["name"] == "h100" and "laptop-4gb" in data["profiles"]
    assert data["computer"]["cores"] >= 1
    out = cli("machine", "show").out
    assert "Profile laptop-4gb" in out and "This computer" in out
    assert max(map(len, out.splitlines())) <= 100
