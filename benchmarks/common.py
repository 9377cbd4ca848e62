"""What every benchmark shares: the models of the suite, and results as JSON with date and machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import onnx

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))  # tests.support: the light models of the onnx package, their weights re-drawn

LIGHT_MODELS = ("squeezenet", "resnet50", "inception_v1", "densenet121")
OWN_MODELS = ("unet", "bert")
PACKAGES = ("hybridc", "apache-tvm", "onnxruntime", "openvino", "torch", "numpy")
"""Whose versions are noted with a result."""


def suite_model(name: str) -> onnx.ModelProto:
    """A model by name: onnx's light models with weights re-drawn, or one of hybridc's builders."""
    if name in LIGHT_MODELS:
        from tests.support.light_models import light_model

        return light_model(name)
    from hybridc import models

    return models.build(name)


def suite_feeds(model: onnx.ModelProto) -> dict[str, Any]:
    """Seeded values for the inputs of a model."""
    from tests.support.light_models import random_feeds

    return random_feeds(model, 0)


def processor() -> str:
    """The processor's name as the kernel tells it, and its family and model: virtual machines leave out the
    number in the name."""
    fields = dict(
        re.findall(r"^(\w[\w ]*\w)\s*:[ \t]*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    )
    if "model name" not in fields:
        return platform.processor()
    return f"{fields['model name']} (family {fields.get('cpu family')}, model {fields.get('model')})"


def write_result(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write `benchmarks/results/NAME.json`: rows, and what they were measured on."""
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    packages = [name for name in PACKAGES if name in installed]
    record = {
        "benchmark": name,
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "rows": rows,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def rows_with_origin(name: str) -> list[dict[str, Any]]:
    """The same, each with the date and the processor of its measurement."""
    path = RESULTS / f"{name}.json"
    record = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return [{k: record[k] for k in ("date", "processor")} | row for row in record["rows"]]


def result_rows(name: str) -> list[dict[str, Any]]:
    """The rows of `benchmarks/results/NAME.json`, if there is one."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []
