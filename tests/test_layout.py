"""The three linked packages are there: a checkout without symlinks would build a wheel that lacks them."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hybridc


@pytest.mark.parametrize("name", ["passes", "schedules", "models"])
def test_the_linked_packages_are_the_folders_at_the_top(name):
    module = importlib.import_module(f"hybridc.{name}")
    link = Path(hybridc.__path__[0]) / name
    assert link.is_symlink() == (Path(hybridc.__path__[0]).parent / "pyproject.toml").exists()
    assert module.__file__ is not None and Path(module.__file__).exists()


def test_importing_hybridc_loads_no_compiler():
    program = "import hybridc, sys; print(*sys.modules, sep='\\n')"
    printed = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert not {"tvm", "onnx"} & set(printed.stdout.splitlines())


def test_modules_of_the_command_line_import_each_other_without_a_cycle():
    """Imports inside functions count too: a late import may not hide a cycle."""
    root = Path(hybridc.__path__[0])
    files = {_module_name(root, path): path for path in sorted((root / "cli").rglob("*.py"))}
    imports = {name: _imported(path) & files.keys() for name, path in files.items()}
    order = list(TopologicalSorter(imports).static_order())  # raises CycleError with the cycle
    assert order.index("hybridc.cli.support.summary") < order.index("hybridc.cli.compile")


def _module_name(root: Path, path: Path) -> str:
    return ".".join(("hybridc", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


def _imported(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = {node.module or "" for node in nodes}
    return modules | {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert hybridc.__version__ == version("hybridc")
