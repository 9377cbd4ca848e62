"""Values of any type at any place of an artifact's files: they are refused by name, or do no harm."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hybridc.artifact import open_artifact
from hybridc.cli import main
from hybridc.errors import ArtifactError, PlanError
from hybridc.ir.verify import verify
from hybridc.json_values import sealed
from hybridc.runtime.session import verify_plans
from tests.artifact.test_store_and_load import write
from tests.support.artifacts import hybrid_model, model_for_two_budgets
from tests.support.mutations import HOSTILE_VALUES, places, with_value


def put(path: Path, name: str, data: Any) -> None:
    """Write one of the files, with hashes that are those of what is written."""
    if name == "manifest.json":
        data = sealed(data)
    text = json.dumps(data).encode()
    (path / name).write_bytes(text)
    if name == "plan.json":
        manifest = json.loads((path / "manifest.json").read_text())
        (file,) = (f for f in manifest["files"] if f["name"] == name)
        file.update(size_bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
        put(path, "manifest.json", manifest)


def code_of_refusal(path: Path) -> str | None:
    try:
        verify_plans(open_artifact(path, check_weights=False, check_host=False))
    except ArtifactError as error:
        assert error.what and error.where and error.remedy
        return error.code
    return None


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_any_value_at_any_place_of_a_plan_is_refused_by_name_or_does_no_harm(
    tmp_path: Path, every: int
) -> None:
    path = write(tmp_path / "model.hyb", hybrid_model())
    data = json.loads((path / "plan.json").read_text())
    for place, value in islice(product(places(data), HOSTILE_VALUES), 0, None, every):
        put(path, "plan.json", with_value(data, place, value))
        assert code_of_refusal(path) in (None, "HC303", "HC306"), (place, value)


@pytest.mark.parametrize("model", [hybrid_model(), model_for_two_budgets()], ids=["hybrid", "two budgets"])
def test_several_wrong_values_at_once_are_refused_by_name_or_do_no_harm(tmp_path: Path, model: Any) -> None:
    path = write(tmp_path / "model.hyb", model)
    whole = json.loads((path / "plan.json").read_text())
    for seed in range(400):
        random, data = Random(seed), whole
        for _ in range(random.randint(2, 5)):
            data = with_value(data, random.choice(list(places(data))), random.choice(HOSTILE_VALUES))
        put(path, "plan.json", data)
        assert code_of_refusal(path) in (None, "HC303", "HC306"), seed


def test_any_value_at_any_place_of_a_manifest_is_refused_by_name_or_does_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path / "model.hyb", hybrid_model())
    data = json.loads((path / "manifest.json").read_text())
    refusals = (None, "HC301", "HC302", "HC303", "HC304", "HC305", "HC306")
    for place in places(data):
        for value in HOSTILE_VALUES:
            put(path, "manifest.json", with_value(data, place, value))
            assert code_of_refusal(path) in refusals, (place, value)


@pytest.mark.parametrize("kind", ["tensor", "weight", "workspace"])
def test_buffer_from_before_the_first_step_without_a_name_is_refused(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "model.hyb", hybrid_model())
    data = json.loads((path / "plan.json").read_text())
    buffers = data["plans"][0]["buffers"]
    next(b for b in buffers if b["tensor"] == "a" and b["device"] == "gpu").update(
        tensor=[], first_step=-1, kind=kind
    )
    put(path, "plan.json", data)
    assert code_of_refusal(path) == "HC303"


def test_input_that_plan_and_manifest_list_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.hyb", hybrid_model())
    plans = json.loads((path / "plan.json").read_text())
    plans["graphs"][0]["inputs"] *= 2
    put(path, "plan.json", plans)
    manifest = json.loads((path / "manifest.json").read_text())
    put(path, "manifest.json", manifest | {"inputs": manifest["inputs"] * 2})
    assert code_of_refusal(path) == "HC303"


def test_the_command_line_calls_a_hostile_plan_the_artifacts_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "model.hyb", hybrid_model())
    data = json.loads((path / "plan.json").read_text())
    for place, value, code in (
        (("plans", 0, "buffers", 0, "tensor"), [], "HC303"),
        (("plans", 0, "steps", 0, "copy"), "nothing", "HC306"),
    ):
        put(path, "plan.json", with_value(data, place, value))
        assert main(["plan", str(path)]) == 3
        assert f"error[{code}]" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["steps", "buffers", "arenas"])
def test_verifier_never_fails_on_fields_of_other_types(what: str) -> None:
    model = hybrid_model()
    parts = getattr(model.plan, what)
    for index, part in enumerate(parts):
        for field in fields(part):
            for value in HOSTILE_VALUES:
                changed = replace(part, **{field.name: value})
                all_parts: dict[str, Any] = {what: (*parts[:index], changed, *parts[index + 1 :])}
                plan = replace(model.plan, **all_parts)
                try:
                    verify(model.graph, plan)
                except PlanError as error:
                    assert error.code.startswith("HC2"), (part, field.name, value)


@pytest.mark.parametrize("cut", [{"axis": 0, "count": 0}, {"axis": 9, "count": 0}])
def test_an_output_is_cut_by_counts_and_along_axes_that_there_are(
    tmp_path: Path, cut: dict[str, int]
) -> None:
    path = write(tmp_path / "model.hyb", hybrid_model())
    data = json.loads((path / "manifest.json").read_text())
    data["outputs"][0]["cuts"] = [cut]
    put(path, "manifest.json", data)
    assert code_of_refusal(path) == "HC303"
