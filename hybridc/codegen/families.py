"""Functions that differ in nothing but numbers -> one function that is given these numbers when it is called.

The buckets of an open dimension have kernels that are the same but for loop bounds and strides, and each
takes as long to compile as any other. So a *family* of them is compiled once: numbers in which its members
differ are parameters, and each member passes its own (`entries.py`). This is anti-unification (Plotkin, A
note on inductive generalization, Machine Intelligence 5, 1970) of integers alone.

Numbers that shape code stay as they are, so that a family is as fast as its members: extents of vectors and
unrolled loops, sizes of local arrays, immediate operands, and divisors, as division by a known number is a
multiplication; but for divisors of a task's number, which is divided a few times in a task.
"""

from __future__ import annotations

import json
import marshal
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm_ffi.serialization import from_json_graph_str

from hybridc.codegen.flat import flattened
from hybridc.garbage import uncollected

_Node = dict[str, Any]
"""Of TVM's JSON: most numbers in its `data` are positions of other nodes, which come before it."""
_Links = tuple[tuple[Any, int], ...]
"""Keys in `data`, and the positions that they stand for."""

_KNOWN = frozenset(
    [
        "None",
        "bool",
        "int",
        "ffi.Array",
        "ffi.Map",
        "ffi.String",
        "ir.Call",
        "ir.DictAttrs",
        "ir.FloatImm",
        "ir.IntImm",
        "ir.Op",
        "ir.PointerType",
        "ir.PrimType",
        "ir.Range",
        "ir.StringImm",
        "ir.TensorLoad",
        "ir.TensorRegion",
        "ir.TupleType",
        "ir.Var",
        "prim.Add",
        "prim.And",
        "prim.Broadcast",
        "prim.Cast",
        "prim.Div",
        "prim.EQ",
        "prim.FloorDiv",
        "prim.FloorMod",
        "prim.GE",
        "prim.GT",
        "prim.LE",
        "prim.LShift",
        "prim.LT",
        "prim.Let",
        "prim.Max",
        "prim.Min",
        "prim.Mod",
        "prim.Mul",
        "prim.NE",
        "prim.Not",
        "prim.Or",
        "prim.Ramp",
        "prim.Select",
        "prim.Shuffle",
        "prim.Sub",
        "s_tir.MatchBufferRegion",
        "s_tir.SBlock",
        "s_tir.SBlockRealize",
        "target.Target",
        "target.TargetKind",
        "tirx.AllocBuffer",
        "tirx.AttrStmt",
        "tirx.Axis",
        "tirx.Bind",
        "tirx.BufferRegionType",
        "tirx.BufferStore",
        "tirx.BufferType",
        "tirx.DeclBuffer",
        "tirx.Evaluate",
        "tirx.For",
        "tirx.IfThenElse",
        "tirx.Iter",
        "tirx.IterVar",
        "tirx.PrimFunc",
        "tirx.SeqStmt",
        "tirx.TileLayout",
        "tirx.While",
    ]
)
"""Kinds of nodes of which we know what their fields are; functions with others are families by themselves."""
_PLAIN = {
    "ir.FloatImm": {"value"},
    "ir.IntImm": {"value"},
    "tirx.BufferType": {"data_alignment", "offset_factor"},
    "tirx.For": {"kind"},
    "tirx.IterVar": {"iter_type"},
    "tirx.PrimFunc": {"ty"},
}
"""Fields that are no links: numbers, and what is read otherwise; so are all spans, which are left out."""
_PARALLEL, _VECTORIZED, _UNROLLED = 1, 2, 3
"""Kinds of loops."""
_SHAPING = {
    "ir.IntImm": {"ty"},
    "prim.Broadcast": {"lanes"},
    "prim.Ramp": {"stride", "lanes"},
    "prim.Shuffle": {"indices"},
    "tirx.AttrStmt": {"node", "value"},
    "s_tir.SBlock": {"annotations", "match_buffers"},
    "tirx.For": {"annotations", "step", "thread_binding"},
    "tirx.PrimFunc": {"attrs", "ret_type"},
}
"""Fields below which numbers shape code."""
_NUMBERS = frozenset({"int", "ir.IntImm"})
_INTEGERS = frozenset({"int32", "int64", "uint64"})
_TRUNCATING = {"prim.FloorDiv": "prim.Div", "prim.FloorMod": "prim.Mod"}
_DIVISIONS = frozenset({*_TRUNCATING, *_TRUNCATING.values()})
_UNKNOWN = frozenset({"ir.TensorLoad", "ir.Call", "prim.Sub"})
"""What depends on data, or might be negative."""
_BY_CONTENT = 2
"""The last version of Python's format in which equal objects always have the same bytes."""
_FREE, _IMMEDIATE, _SHAPES = range(3)
"""Numbers below a node may differ; may differ but for its own operands; shape code."""


@dataclass(frozen=True, slots=True)
class Family:
    """A function, and the functions that it stands for."""

    function: tirx.PrimFunc
    """Its first parameters are the numbers."""
    members: Mapping[str, tuple[int, ...]]
    """By name, the numbers that are theirs."""


def families(functions: Mapping[str, tirx.PrimFunc]) -> tuple[Family, ...]:
    """The functions, those together that differ in nothing but numbers that do not shape code.

    Requires: scheduled functions of the CPU with `global_symbol`.
    Ensures: each is a member of one family, whose function with the member's numbers as its first arguments
    computes what the member does. A function like no other is a family by itself. Families and members come
    in the order of the functions. All functions are `flattened`.
    """
    flat = flattened(functions)
    alike: dict[str | bytes, dict[str, _Form | None]] = defaultdict(dict)
    with uncollected():  # a third of the time otherwise
        read = {name: _read(function) for name, function in flat.items()}
        counts = {name: _counts(nodes) for name, nodes in read.items()}
        often = Counter(counts.values())
        for name, nodes in read.items():
            # what has other nodes than any other needs no look at its numbers
            form = _form(nodes) if often[counts[name]] > 1 else None
            alike[name if form is None else form.skeleton][name] = form
        return tuple(_family(flat, forms) for forms in alike.values())


def _family(functions: Mapping[str, tirx.PrimFunc], forms: Mapping[str, _Form | None]) -> Family:
    known = [form for form in forms.values() if form is not None]
    name, form = next(iter(forms)), next(iter(known), None)
    if form is None or len(known) == 1:
        return Family(functions[name], {name: ()})
    columns = list(zip(*(each.numbers for each in known), strict=True))
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    parameters = {
        index: first.setdefault((form.dtype(index), column), index)
        for index, column in enumerate(columns)
        if len(set(column)) > 1
    }
    function = form.with_parameters(parameters).with_attrs(dict(functions[name].attrs))
    members = {
        member: tuple(each.numbers[index] for index in first.values())
        for member, each in zip(forms, known, strict=True)
    }
    return Family(function.with_attr("global_symbol", f"{name}_family"), members)


@dataclass(frozen=True, slots=True)
class _Form:
    """A function apart from its numbers that do not shape code."""

    nodes: list[_Node]
    """The function comes last. Each use of a number is an `int` and behind it an `ir.IntImm`."""
    places: list[int]
    """Of the numbers that do not shape code."""
    numbers: list[int]
    skeleton: bytes
    """The nodes without these numbers."""

    def dtype(self, index: int) -> str:
        """Of a number."""
        number = self.nodes[self.places[index] + 1]["data"]
        return str(self.nodes[number["ty"]]["data"]["dtype"])

    def with_parameters(self, parameters: Mapping[int, int]) -> tirx.PrimFunc:
        """The function with a parameter for each of some numbers: that of the number it is mapped to."""
        moved = {self.places[index] + 1: self.places[first] + 1 for index, first in parameters.items()}
        nodes = [_relinked(_truncating(node, moved), moved) for node in self.nodes]
        own = list(dict.fromkeys(moved.values()))
        for count, place in enumerate(own):
            nodes[place - 1] = {"type": "ffi.String", "data": f"n{count}"}
            var = {"span": 0, "ty": nodes[place]["data"]["ty"], "name": place - 1}
            nodes[place] = {"type": "ir.Var", "data": var}
        *nodes, root = nodes
        arrays = nodes[root["data"]["params"]]["data"]
        nodes.append({"type": "ffi.Array", "data": [*own, *arrays]})
        nodes.append({**root, "data": {**root["data"], "params": len(nodes) - 1}})
        made = from_json_graph_str(json.dumps({"root_index": len(nodes) - 1, "nodes": nodes}))
        return tirx.PrimFunc(made.params, made.body, made.ret_type)  # its type has the new parameters, too


@dataclass(frozen=True, slots=True)
class _Nodes:
    """A function in TVM's JSON."""

    nodes: list[_Node]
    root: int


def _read(function: tirx.PrimFunc) -> _Nodes:
    read = json.loads(tvm.ir.save_json(function.without_attr("global_symbol")))
    return _Nodes(read["nodes"], read["root_index"])


def _counts(read: _Nodes) -> frozenset[tuple[str, int]]:
    """How many nodes there are of each kind: the same in all members of a family, but for numbers."""
    kinds = Counter(node["type"] for node in read.nodes)
    return frozenset((kind, count) for kind, count in kinds.items() if kind not in _NUMBERS)


def _form(read: _Nodes) -> _Form | None:
    """None if there are nodes that are not known."""
    nodes = read.nodes
    links = [_links(node) for node in nodes]
    uses = _uses(nodes, links, read.root)
    if any(use and node["type"] not in _KNOWN for node, use in zip(nodes, uses, strict=True)):
        return None
    made: list[_Node] = [{"type": "None"}]  # for spans
    hidden = [*made]
    places: list[int] = []
    copies: dict[tuple[int, int], int] = {}

    def number(position: int, mode: int) -> int:
        """Where a copy for one use is."""
        data = nodes[position]["data"]
        value = nodes[data["value"]]
        is_free = mode == _FREE and nodes[data["ty"]]["data"]["dtype"] in _INTEGERS
        if is_free:
            places.append(len(made))
        imm = {
            "type": "ir.IntImm",
            "data": {"span": 0, "ty": copies[data["ty"], _SHAPES], "value": len(made)},
        }
        made.extend((value, imm))
        hidden.extend(({"type": "int"} if is_free else value, imm))
        return len(made) - 1

    for position, node in enumerate(nodes):
        if node["type"] == "ir.IntImm":
            continue
        for mode, below in uses[position].items():
            found = {
                key: number(operand, way) if nodes[operand]["type"] == "ir.IntImm" else copies[operand, way]
                for (key, operand), way in zip(links[position], below, strict=True)
            }
            copies[position, mode] = len(made)
            made.append(_with(node, found))
            hidden.append(made[-1])
    root = made[-1]["data"]
    root["ty"] = root["ret_type"]  # any type: its own says what the parameters say
    return _Form(made, places, [made[place]["data"] for place in places], marshal.dumps(hidden, _BY_CONTENT))


def _uses(nodes: Sequence[_Node], links: Sequence[_Links], root: int) -> list[dict[int, list[int]]]:
    """Of each node the ways in which it is used, and in which way each of its links is used then."""
    arrays = set(nodes[nodes[root]["data"]["params"]]["data"])
    arrays.update(node["data"]["buffer"] for node in nodes if node["type"] == "tirx.DeclBuffer")
    by_task = _computed_by_task(nodes, links)
    uses: list[dict[int, list[int]]] = [{} for _ in nodes]
    uses[root][_FREE] = []
    for position in range(root, -1, -1):  # readers come behind what they read
        for mode, below in uses[position].items():
            for key, operand in links[position]:
                way = _way(nodes[position], key, mode, by_task)
                if nodes[operand]["type"] == "ir.Var":  # one, however it is used
                    way = _FREE if operand in arrays else _SHAPES
                elif way == _IMMEDIATE and nodes[operand]["type"] != "ffi.Array":
                    way = _SHAPES if nodes[operand]["type"] == "ir.IntImm" else _FREE
                below.append(way)
                uses[operand].setdefault(way, [])
    return uses


def _way(node: _Node, key: Any, mode: int, by_task: Sequence[bool]) -> int:
    kind = node["type"]
    if mode == _SHAPES or key in _SHAPING.get(kind, ()):
        return _SHAPES
    if kind == "tirx.For" and node["data"]["kind"] in (_VECTORIZED, _UNROLLED) and key in ("min", "extent"):
        return _SHAPES
    if kind in _DIVISIONS and key == "b" and not by_task[node["data"]["a"]]:
        return _SHAPES
    return _IMMEDIATE if kind == "ir.Call" and key == "args" else mode


def _computed_by_task(nodes: Sequence[_Node], links: Sequence[_Links]) -> list[bool]:
    """Whether each node is a number that follows from that of a task, and not negative."""
    loops = (node["data"] for node in nodes if node["type"] == "tirx.For")
    tasks = {loop["loop_var"] for loop in loops if loop["kind"] == _PARALLEL}
    found: list[bool] = []
    for position, node in enumerate(nodes):
        kind = node["type"]
        if kind == "ir.Var":
            found.append(position in tasks)
        elif kind == "ir.IntImm":
            found.append(nodes[node["data"]["value"]]["data"] >= 0)
        else:
            found.append(kind not in _UNKNOWN and all(found[operand] for _, operand in links[position]))
    return found


def _links(node: _Node) -> _Links:
    kind, data = node["type"], node.get("data")
    if isinstance(data, list):
        return tuple(enumerate(data))
    if isinstance(data, dict) and kind in _KNOWN:
        plain = _PLAIN.get(kind, ())
        return tuple(
            (key, data[key]) for key in data if key != "span" and key not in plain and type(data[key]) is int
        )
    return ()


def _with(node: _Node, links: Mapping[Any, int]) -> _Node:
    """The node with other links."""
    data = node.get("data")
    if isinstance(data, list):
        return {**node, "data": list(links.values())}
    if isinstance(data, dict):
        spans = {"span": 0} if "span" in data else {}
        return {**node, "data": {**data, **spans, **links}}
    return node


def _relinked(node: _Node, moved: Mapping[int, int]) -> _Node:
    return _with(node, {key: moved.get(operand, operand) for key, operand in _links(node)})


def _truncating(node: _Node, parameters: Container[int]) -> _Node:
    """As division by a parameter the one that is an instruction: what is divided is not negative, and TVM's
    rules for rounding down fail for divisors of which they know nothing."""
    if node["type"] in _TRUNCATING and node["data"]["b"] in parameters:
        return {**node, "type": _TRUNCATING[node["type"]]}
    return node
