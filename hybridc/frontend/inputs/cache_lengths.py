"""Sizes of dimensions by which a decoder has room for some positions, where its file leaves them open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx

from hybridc.errors import UsageError
from hybridc.frontend.load import load
from hybridc.options import Size
from hybridc.sizes import Sizes, Sum

_IDS, _MASK, _PAST = "input_ids", "attention_mask", "past_key_values."
_IN_PLACES = ("GroupQueryAttention",)
"""Operators by which new positions take their places in a past that has room for them."""


def context_sizes(
    source: str | Path | bytes | onnx.ModelProto, given: Mapping[str, Size]
) -> Callable[[int], Mapping[str, int]]:
    """Sizes of a decoder's dimensions for a context, of one new token and one sequence unless `given` says
    otherwise.

    The names are those of onnxruntime-genai and optimum. Where new positions stand behind the past, the mask
    has so many more. Raises UsageError HC539 if it is no such decoder, or its context is fixed.
    """
    loaded = load(source)
    graph, name = loaded.proto.graph, loaded.source.name
    dims = {value.name: [d.dim_param for d in value.type.tensor_type.shape.dim] for value in graph.input}
    pasts = {dims[each][2] for each in dims if each.startswith(_PAST) and len(dims[each]) == 4}
    if _IDS not in dims or _MASK not in dims or len(dims[_IDS]) != 2 or not pasts:
        raise _refused(
            name, "it is no decoder with a cache", f"it must have {_IDS}, {_MASK} and {_PAST}N.key and .value"
        )
    past, mask = next(iter(pasts)), dims[_MASK][-1]
    if len(pasts) > 1 or not past or not mask:
        remedy = "export it with an open length; of `hybridc models export`, --param dynamic_context=True"
        raise _refused(name, "its cache has room for a fixed number of positions", remedy)
    one = {dim: 1 for dim in dims[_IDS] if dim and dim not in given}
    new = {**one, **given}.get(dims[_IDS][1], 1)
    if isinstance(new, Sizes | Sum):
        what = f"a context is planned for one number of new tokens, not for {new}"
        raise UsageError("HC512", what, remedy=f"give one size, for example --dim {dims[_IDS][1]}=1")
    more = 0 if any(node.op_type in _IN_PLACES for node in _nodes(loaded.proto)) else new
    return lambda context: {**one, mask: context + more, past: context}


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    parts: Sequence[onnx.GraphProto | onnx.FunctionProto] = (model.graph, *model.functions)
    for part in parts:
        yield from part.node


def _refused(name: str, what: str, remedy: str) -> UsageError:
    return UsageError("HC539", f"its context cannot be varied: {what}", where=name, remedy=remedy)
