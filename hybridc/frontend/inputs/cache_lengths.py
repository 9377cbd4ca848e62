"""Sizes of dimensions by which a decoder has room for some positions, where its file leaves them open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import onnx

from hybridc.errors import UsageError
from hybridc.frontend.load import Loaded
from hybridc.options import Size
from hybridc.sizes import Sum

_IDS, _MASK, _PAST = "input_ids", "attention_mask", "past_key_values."
_IN_PLACES = ("GroupQueryAttention",)
"""Operators by which new positions take their places in a past that has room for them."""


@dataclass(frozen=True, slots=True)
class DecoderDimensions:
    """The open dimensions of a decoder, by the names that its file gives them."""

    past: str
    """Positions that there is room for."""
    mask: str
    new: str
    """Tokens of a run, of each sequence; empty: as many as the file says."""
    others: Mapping[str, int]
    """Sequences, of which there is one, and columns of a head of keys."""
    is_appended: bool
    """Whether new positions stand behind the past, so that the mask has so many more."""

    def sizes(self, context: int, new: Size, given: Mapping[str, Size]) -> dict[str, Size]:
        """What decides a context, and what `given` leaves open: so many tokens of a run."""
        left = {name: size for name, size in {**self.others, self.new: new}.items() if name not in given}
        left.pop("", None)
        mask: Size = context
        if self.is_appended:
            new = given.get(self.new, new)
            mask = context + new if isinstance(new, int) else Sum((self.past, self.new))
        return {**left, self.past: context, self.mask: mask}


def decoder_dimensions(loaded: Loaded) -> DecoderDimensions:
    """Of a decoder as onnxruntime-genai and optimum name its inputs.

    Raises UsageError HC539 if it is none, or its context is fixed.
    """
    graph, name = loaded.proto.graph, loaded.source.name
    dims = {value.name: [d.dim_param for d in value.type.tensor_type.shape.dim] for value in graph.input}
    caches = [dims[each] for each in dims if each.startswith(_PAST) and len(dims[each]) == 4]
    if _IDS not in dims or _MASK not in dims or len(dims[_IDS]) != 2 or not caches:
        raise _refused(
            name, "it is no decoder with a cache", f"it must have {_IDS}, {_MASK} and {_PAST}N.key and .value"
        )
    pasts = {cache[2] for cache in caches}
    past, mask = next(iter(pasts)), dims[_MASK][-1]
    if len(pasts) > 1 or not past or not mask:
        remedy = "export it with an open length; of `hybridc models export`, --param dynamic_context=True"
        raise _refused(name, "its cache has room for a fixed number of positions", remedy)
    batch, new = dims[_IDS]
    others = {batch: 1, **_depths(loaded.proto, {cache[3] for cache in caches if cache[3]})}
    is_appended = not any(node.op_type in _IN_PLACES for node in _nodes(loaded.proto))
    return DecoderDimensions(past, mask, new, others, is_appended)


def _depths(model: onnx.ModelProto, names: Set[str]) -> dict[str, int]:
    """Columns of a head, where a file names them as genai's do: they follow from what attention reads."""
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    for node in model.graph.node if len(names) == 1 else ():
        if node.op_type not in _IN_PLACES or not shapes.get(node.input[0]):
            continue
        counts = {a.name: a.i for a in node.attribute if a.name in ("num_heads", "kv_num_heads")}
        heads, shared = counts.get("num_heads", 0), counts.get("kv_num_heads", 0)
        read = heads if node.input[1] else heads + 2 * shared  # the query may hold keys and values, too
        depth, rest = divmod(shapes[node.input[0]][-1], read) if read else (0, 0)
        if depth and not rest:
            return dict.fromkeys(names, depth)
    return {}


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    parts: Sequence[onnx.GraphProto | onnx.FunctionProto] = (model.graph, *model.functions)
    for part in parts:
        yield from part.node


def _refused(name: str, what: str, remedy: str) -> UsageError:
    return UsageError("HC539", f"its context cannot be chosen: {what}", where=name, remedy=remedy)
