"""`make test` installs the extras cuda, test and lint alone: collecting a test needs no other package."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
INSTALLED_EXTRAS = ("cuda", "test", "lint")
"""As `EXTRAS` in the Makefile."""
MODULES = {"scikit-learn": "sklearn"}
"""Packages that are imported under another name."""


@cache
def optional_modules() -> frozenset[str]:
    """Top-level modules of the extras that `make test` does not install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages(names: set[str]) -> set[str]:
        found = {re.split(r"[<>=! ;\[]", line)[0] for name in names for line in extras[name]}
        return {MODULES.get(package, package) for package in found}

    return frozenset(packages(set(extras) - set(INSTALLED_EXTRAS)) - packages(set(INSTALLED_EXTRAS)))


@cache
def needed(path: Path) -> frozenset[str]:
    """Optional modules that importing a file needs; what follows an `importorskip` of one may need it."""
    return frozenset(_needed(ast.parse(path.read_text())))


def _needed(module: ast.Module) -> Iterator[str]:
    skipped: set[str] = set()
    for statement in module.body:
        skipped |= set(_import_or_skip(statement))
        yield from (set(_imported(statement)) & optional_modules()) - skipped
        for name in _imported_support(statement):
            yield from needed(name) - skipped


def _imported(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name.split(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module:
        yield statement.module.split(".")[0]


def _imported_support(statement: ast.stmt) -> Iterator[Path]:
    """Files of the tests' own that a statement imports."""
    if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("tests."):
        path = ROOT / (statement.module or "").replace(".", "/")
        names = [path.with_suffix(".py"), *(path / f"{alias.name}.py" for alias in statement.names)]
        yield from (name for name in names if name.is_file())


def _import_or_skip(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        match node:
            case ast.Call(func=ast.Attribute(attr="importorskip"), args=[ast.Constant(value=str(name)), *_]):
                yield name.split(".")[0]


@pytest.mark.parametrize(
    "path",
    sorted(p for p in TESTS.rglob("*.py") if p.name.startswith(("test_", "conftest"))),
    ids=lambda path: str(path.relative_to(TESTS)),
)
def test_collecting_a_file_needs_no_optional_package(path: Path) -> None:
    assert not needed(path), "import it by pytest.importorskip, before what needs it"


def test_optional_packages_are_told_from_installed_ones() -> None:
    assert {"torch", "sklearn", "openvino"} <= optional_modules()
    assert not {"onnxruntime", "ortools", "hypothesis", "mypy", "pytest"} & optional_modules()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", {"torch"}),
        ("from torch import Tensor", {"torch"}),
        ("import pytest\ntorch = pytest.importorskip('torch')\nfrom torch import Tensor", set()),
        ("from tests.support.torch_reference import TorchReference", {"torch"}),
        ("def reads():\n    import torch", set()),
    ],
)
def test_what_is_needed_is_read_off_the_source(source: str, expected: set[str]) -> None:
    assert set(_needed(ast.parse(source))) == expected
