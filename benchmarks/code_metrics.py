"""How the code is laid out: folders, imports, parameters, comments, documentation.

    python benchmarks/code_metrics.py [--before REVISION]

Counts the product alone (hybridc, passes, schedules, models), of the working tree and, with `--before`, of a
revision of git beside it. Nothing is imported or run.

An import counts wherever it stands: at the top, inside a function, or for type checkers only. Neighbours are
the files and folders directly in one folder, a folder taken as a whole. Neighbours, or modules, that import
each other directly or through others form a circle; an import within a circle runs back up. Parameters leave
out `self` and `cls`. Comments are those with `#` and the texts below constants and fields, for a hundred
lines with code on them. A public function has no leading underscore, nor has its class.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINKED = ("passes", "schedules", "models")
"""Folders at the top that are packages of hybridc."""
COMMENTED = ("hybridc.passes.planner", "hybridc.schedules")
"""Where numbers are chosen, so that comments are counted there by themselves."""
CROWDED = 20
"""Files that a folder may hold directly."""

Graph = Mapping[str, frozenset[str]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="REVISION", help="measure this revision as well")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    columns = {"now": metrics(ROOT)}
    if arguments.before:
        with tempfile.TemporaryDirectory() as folder:
            _check_out(arguments.before, Path(folder))
            columns = {arguments.before: metrics(Path(folder)), **columns}
    print(json.dumps(columns, indent=1) if arguments.json else _table(columns))
    return 0


def metrics(root: Path) -> dict[str, Any]:
    """Every figure of the tree at `root`, by what it is called in the table."""
    files = sources(root)
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    modules = {name: frozenset(_imported(name, tree, trees)) for name, tree in trees.items()}
    levels = siblings(modules)
    in_folder = Counter(_folder(name, files) for name in files)
    functions = [function for tree in trees.values() for function in _functions(tree)]
    parameters = sorted(_parameters(function) for function in functions)
    lengths = [(function.end_lineno or 0) - function.lineno + 1 for function in functions]
    return {
        "files": len(files),
        "folders": len(in_folder),
        "most files directly in a folder": max(in_folder.values()),
        f"folders of more than {CROWDED} files": sum(count > CROWDED for count in in_folder.values()),
        "imports between neighbours": sum(len(o) for graph in levels.values() for o in graph.values()),
        "neighbours' imports that run back up": sum(len(backward(graph)) for graph in levels.values()),
        "circles of modules": len(circles(modules)),
        "modules in circles": sum(map(len, circles(modules))),
        "parameters of a function, 90th percentile": _percentile(parameters, 90),
        "most parameters of a function": parameters[-1],
        "lines of a function, median": int(statistics.median(lengths)),
        "lines of a function, 90th percentile": _percentile(sorted(lengths), 90),
        "lines of the longest function": max(lengths),
        **{
            f"comments per 100 lines in {part.removeprefix('hybridc.').replace('.', '/')}": _comments(
                path for name, path in files.items() if name.startswith(part)
            )
            for part in COMMENTED
        },
        "public functions documented, %": _documented(trees.values()),
        "public functions documented in schedules/cpu, %": _documented(
            tree for name, tree in trees.items() if name.startswith("hybridc.schedules.cpu")
        ),
        "class names used more than once": sum(
            count > 1 for count in Counter(_classes(trees.values())).values()
        ),
    }


def sources(root: Path) -> dict[str, Path]:
    """The product's modules by name; the packages at the top are named as they are imported."""
    found = {}
    for top in ("hybridc", *LINKED):
        for path in sorted((root / top).rglob("*.py")):
            relative = path.relative_to(root)
            if any((root / parent).is_symlink() for parent in relative.parents):
                continue
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            found[name if top == "hybridc" else f"hybridc.{name}"] = path
    return found


def siblings(modules: Graph) -> dict[str, Graph]:
    """For each package the imports between its children: modules, and sub-packages as a whole."""
    found: dict[str, dict[str, set[str]]] = {}
    for name, imported in modules.items():
        for other in imported:
            common = _common_package(name, other)
            child, imported_child = (_child_of(common, module) for module in (name, other))
            if common and child and imported_child and child != imported_child:
                children = found.setdefault(common, {})
                children.setdefault(child, set()).add(imported_child)
                children.setdefault(imported_child, set())
    return {
        package: {child: frozenset(others) for child, others in children.items()}
        for package, children in found.items()
    }


def _common_package(*names: str) -> str:
    """The innermost package that holds all modules; a package's own file stands above its children."""
    parts = [name.split(".") for name in names]
    length = next((i for i, same in enumerate(zip(*parts, strict=False)) if len(set(same)) > 1), None)
    return ".".join(parts[0][: min(map(len, parts)) if length is None else length])


def _child_of(package: str, module: str) -> str | None:
    return None if module == package else ".".join(module.split(".")[: package.count(".") + 2])


def _folder(name: str, files: Mapping[str, Path]) -> str:
    return name if files[name].name == "__init__.py" else name.rpartition(".")[0]


def circles(graph: Graph) -> list[frozenset[str]]:
    """Strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            start = stack.index(node)
            found.append(frozenset(stack[start:]))
            del stack[start:]

    for node in graph:
        if node not in index:
            visit(node)
    return [component for component in found if len(component) > 1]


def backward(graph: Graph) -> list[tuple[str, str]]:
    """Imports within a circle."""
    return [(a, b) for circle in circles(graph) for a in sorted(circle) for b in sorted(graph[a] & circle)]


def _imported(name: str, tree: ast.Module, known: Mapping[str, Any]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [target if target in known else node.module for target in targets]
        else:
            continue
        yield from (target for target in targets if target in known and target != name)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return sum(name not in ("self", "cls") for name in names)


def _documented(trees: Iterable[ast.Module]) -> float:
    public = [function for tree in trees for function in _public(tree.body)]
    return round(100 * sum(ast.get_docstring(function) is not None for function in public) / len(public), 1)


def _public(body: Iterable[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node


def _classes(trees: Iterable[ast.Module]) -> Iterator[str]:
    for tree in trees:
        yield from (node.name for node in tree.body if isinstance(node, ast.ClassDef))


def _comments(paths: Iterable[Path]) -> float:
    comments = code = 0
    for path in paths:
        text = path.read_text()
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        comments += sum(token.type == tokenize.COMMENT for token in tokens)
        comments += sum(_is_text(node) for node in _after_assignments(ast.parse(text)))
        blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        strings = {line for node in ast.walk(ast.parse(text)) if _is_text(node) for line in _lines(node)}
        lines = {line for t in tokens if t.type not in blank for line in range(t.start[0], t.end[0] + 1)}
        code += len(lines - strings)
    return round(100 * comments / code, 1)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _lines(node: ast.AST) -> range:
    return range(node.lineno, (node.end_lineno or 0) + 1)  # type: ignore[attr-defined]


def _after_assignments(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
        for before, after in pairwise(body):
            if isinstance(before, ast.Assign | ast.AnnAssign):
                yield after


def _percentile(ordered: list[int], percent: int) -> int:
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def _check_out(revision: str, folder: Path) -> None:
    command = ["git", "archive", revision, "hybridc", *LINKED]
    packed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def _table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    labels = list(dict.fromkeys(label for column in columns.values() for label in column))
    rows = [
        ["", *columns],
        *([label, *(str(c.get(label, "")) for c in columns.values())] for label in labels),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


if __name__ == "__main__":
    raise SystemExit(main())
