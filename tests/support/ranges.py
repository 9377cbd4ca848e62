"""Networks with open dimensions, padded to the largest sizes of a bucket, and run so by onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from hybridc.frontend import codes
from hybridc.frontend.counted.outputs import Cuts, cuts_of
from hybridc.frontend.inputs.shapes import fix_shapes
from hybridc.frontend.load import load
from hybridc.frontend.ranges.opening import Dimension, Opening, at_bounds, open_dimensions
from hybridc.frontend.simplify import simplify
from hybridc.sizes import Bucket, Sizes
from tests.support.expansion import parsed


@dataclass(frozen=True, slots=True)
class Padded:
    """A network of fixed shapes that is fed padded inputs, and the sizes that count."""

    model: onnx.ModelProto
    dimensions: tuple[Dimension, ...]
    cuts: Cuts

    def run(self, feeds: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
        """Results of inputs of these sizes: padded with zeros, run, and cut."""
        import onnxruntime

        session = onnxruntime.InferenceSession(self.model.SerializeToString())
        fed = {
            value.name: _padded(feeds[value.name], value.shape)
            for value in session.get_inputs()
            if value.name in feeds
        }
        fed |= {f"size of {name}": np.array([size]) for name, size in sizes.items()}
        known = {value.name for value in session.get_inputs()}
        found = session.run(None, {name: array for name, array in fed.items() if name in known})
        results, counts = found[: len(self.cuts.by_output)], found[len(self.cuts.by_output) :]
        for i, cuts in enumerate(self.cuts.by_output):
            for axis, number in cuts:
                results[i] = results[i].take(np.arange(int(counts[number].item())), axis)
        return list(results)


def with_drawn_weights(text: str, known: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """A network whose weights are drawn but for known ones: variances positive, factors around 1."""
    model, random = parsed(text), np.random.default_rng(0)
    nodes = sorted(model.graph.node, key=lambda node: node.op_type != "Constant")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for info in model.graph.value_info:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        drawn = random.standard_normal(shape) / 2 + (info.name in ("variance", "scale"))
        array = np.abs(drawn) if info.name == "variance" else drawn
        array = (known or {}).get(info.name, array.astype(np.float32))
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, info.name))
    del model.graph.value_info[:]
    return model


def padded(model: onnx.ModelProto, dims: Mapping[str, Sizes], bucket: Bucket) -> Padded:
    """The network as the importer gets it. Raises ModelError."""
    dimensions = open_dimensions(model, {}, dims)

    def fixed(sizes: Bucket) -> onnx.ModelProto:
        proto = load(model).proto
        _, known = at_bounds({}, dims, dimensions, sizes)
        fix_shapes(proto, "model", {}, known, codes.Refusals())
        return proto

    def shapes_at(sizes: Bucket) -> dict[str, list[int]]:
        inputs = fixed(sizes).graph.input
        return {v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in inputs}

    opening = Opening(dimensions, bucket, shapes_at)
    made = simplify(fixed(bucket), "model", None, opening=opening)
    return Padded(ir.to_proto(made), dimensions, cuts_of(made.graph))


def _padded(array: np.ndarray, shape: list[int]) -> np.ndarray:
    whole = np.zeros(shape, array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    return whole
