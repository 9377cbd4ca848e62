"""benchmarks/gpu.py plans with a profile whose GPU loads the code, also where nothing is calibrated."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest

from hybridc.codegen.generate import check_gpu
from hybridc.machine import load_machine
from hybridc.targets import parse_target

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_plans_are_for_a_gpu_that_loads_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    # a folder has the name of the script
    spec = importlib.util.spec_from_file_location("gpu_script", FOLDER / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    arguments = argparse.Namespace(parts=list(module.PARTS), machine=None, emulate_gpu=True)
    bench = module.Bench(tmp_path, arguments)
    assert bench.machine is not None
    check_gpu(parse_target(f"{bench.cuda}+avx2"), load_machine(bench.machine))
