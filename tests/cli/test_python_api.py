"""The Python API takes what the command line takes: the same options under the same names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hybridc
from hybridc import keywords, models
from hybridc.cli.main import build_parser
from hybridc.errors import UsageError
from hybridc.options import Budget, CompileOptions

SHOWN_ONLY = {"help", "json", "all", "html", "trace", "measured", "quiet", "program"}
"""Options of what is shown of a result, and how."""
TRAINING = {
    "train",
    "loss",
    "optimizer",
    "batch",
    "accumulate",
    "freeze",
    "clip_norm",
    "ema",
    "sync_batchnorm",
}


def stored(command: str) -> set[str]:
    """Names under which a command's options are stored."""
    return {action.dest for action in build_parser()[1][command]._actions} - SHOWN_ONLY


def parameters(function: Callable[..., Any]) -> set[str]:
    """Names of parameters, those of `**options` included."""
    names = set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            names |= getattr(
                keywords, parameter.annotation.removeprefix("Unpack[")[:-1]
            ).__annotations__.keys()
        else:
            names.add(parameter.name)
    return names - {"progress"}  # the command line shows it


def test_plan_takes_the_options_of_the_command() -> None:
    assert parameters(hybridc.plan) - {"model"} == stored("plan") - {"source"} - TRAINING


def test_compile_takes_the_options_of_the_command() -> None:
    assert parameters(hybridc.compile) == stored("compile") - TRAINING


def test_compile_training_takes_the_options_of_the_command() -> None:
    several_programs = {"stop_after", "dump_ir"}  # refused with --train
    assert parameters(hybridc.compile_training) == stored("compile") - {"train"} - several_programs


def test_plan_training_takes_the_options_of_the_command() -> None:
    assert parameters(hybridc.plan_training) - {"model"} == stored("plan") - {"source", "train"}


def test_plan_training_plans_every_program() -> None:
    model = models.build("mlp", batch=4, inputs=8, hidden=8, layers=2, classes=4)
    options: Any = {"loss": "mse", "target": "avx2"}
    assert list(hybridc.plan_training(model, **options)) == ["step", "evaluate"]


def test_missing_output_is_told_in_words_of_python() -> None:
    with pytest.raises(UsageError) as refusal:
        hybridc.compile("m.onnx", target="avx2")
    assert refusal.value.code == "HC522"
    assert "`output`" in refusal.value.remedy and "`stop_after`" in refusal.value.remedy


@pytest.mark.parametrize("wrong", [{"loss": 3}, {"loss": "mse", "optimizer": 3}])
def test_what_to_train_must_be_text(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        hybridc.compile_training("m.onnx", tmp_path / "s.hyb", target="avx2", **wrong)
    assert refusal.value.code == "HC570"


@pytest.mark.parametrize("command", ["explain", "sweep", "compare"])
def test_commands_that_plan_take_all_that_a_plan_depends_on(command: str) -> None:
    known = keywords.PlanKeywords.__annotations__.keys()
    # a sweep has several, and sizes that are compared are fixed
    assert known <= stored(command) | (set() if command == "explain" else {"context"})


def test_keywords_and_words_make_the_same_options(cli: Any, fakes: Any, model: Path) -> None:
    words = (
        "--target cuda+avx2 --gpu-memory 25%,1MiB --host-memory 1GiB --shape x=1x3 --dim N=4 --machine h100"
        " --pin Conv*=cpu --plan-seconds 3 --plan-timeout 9 --threads 2 --rounding-error 0.02"
        " --profile-kernels --no-cache --robust"
    )
    assert cli("plan", model, *words.split()).code == 0
    given = keywords.options_of(
        {
            "target": "cuda+avx2",
            "gpu_memory": "25%,1MiB",
            "host_memory": "1GiB",
            "shapes": {"x": (1, 3)},
            "dims": {"N": 4},
            "machine": "h100",
            "pins": {"Conv*": "cpu"},
            "plan_seconds": 3,
            "plan_timeout": 9,
            "threads": 2,
            "rounding_error": 0.02,
            "profile_kernels": True,
            "robust": True,
            "cache": False,
        }
    )
    assert fakes.options == [given]


def test_what_is_left_out_or_none_has_the_default(cli: Any, fakes: Any, model: Path) -> None:
    assert cli("plan", model).code == 0
    nothing = dict.fromkeys(keywords.CompileKeywords.__annotations__)
    assert fakes.options == [CompileOptions()] == [keywords.options_of(nothing)]


def test_plan_hands_its_keywords_on(fakes: Any) -> None:
    hybridc.plan("m.onnx", gpu_memory="25%,50%", host_memory="2KiB", threads=3)
    [options] = fakes.options
    assert options.gpu_memory == (Budget(percent=25), Budget(percent=50))
    assert (options.host_memory_bytes, options.threads, str(options.target)) == (
        2048,
        3,
        "cuda+avx2",
    )


@pytest.mark.isa("avx2")
def test_plan_with_effort_for_its_bound() -> None:
    model = models.build("encoder", batch=1, tokens=8, layers=2, hidden=64, heads=2, vocabulary=50)
    options: Any = {"gpu_memory": "50%", "plan_seconds": 0.1}
    loose, tight = hybridc.plan(model, **options), hybridc.plan(model, bound_seconds=0.5, **options)
    assert loose.plan.steps == tight.plan.steps
    assert loose.plan.time_bound_us <= tight.plan.time_bound_us <= tight.plan.makespan_us
    with pytest.raises(UsageError) as refusal:
        hybridc.plan(model, target="avx2", bound_seconds=2)
    assert refusal.value.code == "HC515"


def test_unknown_keywords_are_refused() -> None:
    unknown: Any = {"gpu_memry": "50%"}
    with pytest.raises(TypeError, match="'gpu_memry'"):
        hybridc.plan("m.onnx", **unknown)
    tuning: Any = {"tune_seconds": 1}
    with pytest.raises(TypeError, match="'tune_seconds'"):  # nothing is compiled
        hybridc.plan("m.onnx", **tuning)


def test_training_in_fp16_is_refused_in_python_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        hybridc.compile_training("m.onnx", tmp_path / "s.hyb", target="avx512_bf16", precision="fp16")
    assert refusal.value.code == "HC525"
