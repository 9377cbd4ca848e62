"""Inline functions, expand operators, drop nodes that do nothing, fold constants: never copying a large or
tied weight."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import _constant_folding

from hybridc.errors import HybridcError, ModelError
from hybridc.frontend import codes
from hybridc.frontend.counted.outputs import has_data_extents, return_counts
from hybridc.frontend.expand.builder import Builder
from hybridc.frontend.expand.control.choices import has_choices, undecided_choices
from hybridc.frontend.folding import FoldAndExpand, origin
from hybridc.frontend.parameters import TRAINING_BATCH_NORM, to_training_form
from hybridc.frontend.ranges.follow import Folded, follow_sizes
from hybridc.frontend.ranges.opening import Opening
from hybridc.frontend.ranges.replay import Tape
from hybridc.frontend.tensors import leave_unread, put_weights
from hybridc.frontend.values import constant_array, constant_attribute, static_shape
from hybridc.placeholders import is_placeholder
from hybridc.sizes import Bucket, listing_remedy

FOLD_INPUT_ELEMENTS = 8192
FOLD_OUTPUT_ELEMENTS = 512 * 512
_MERGED_BYTES = 1 << 16
"""Of weights that it pays to compare with one another."""
_COMPARED_FIRST = 4096
"""Bytes at the beginning of each of them."""
MAX_GENERATED_BYTES = 4 << 30
"""Of all arrays that ConstantOfShape nodes make: a few bytes of a file can ask for any size."""

MAX_RANK = 16
_MOST_ROUNDS = 8
"""Of folding: quantized layers, one behind the other's computed shape, may need one each."""
# Folded whatever their size if the weights have no other use: the result replaces them.
_REARRANGING = ("Cast", "Concat", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")

_CHOOSING = ("Compress", "NonMaxSuppression", "NonZero", "Unique")
"""Their results have as many elements as their operands decide, but no more than a few for each of these."""
_COMPUTING = (
    "Abs",
    "Add",
    "And",
    "Ceil",
    "Div",
    "Gemm",
    "LessOrEqual",
    "Log",
    "MatMul",
    "Mul",
    "Sign",
    "Sub",
    "Where",
)
_UNPACKING = ("GatherBlockQuantized", "MatMulBnb4", "MatMulNBits")
"""Operators of which packed weights are made, or dense ones, of the constants that they read."""


def simplify(
    model: onnx.ModelProto,
    name: str,
    folder: Path | None,
    *,
    unread: frozenset[str] = frozenset(),
    weights: Mapping[str, ir.TensorProtocol] = {},
    for_training: bool = False,
    refusals: codes.Refusals | None = None,
    opening: Opening | None = None,
) -> ir.Model:
    """The same computation with fewer nodes, and none that calls a model-local function.

    Initializers have the contents that are `weights`, if they are apart from the model, and those that are
    `unread` have placeholders.
    `for_training` keeps Dropout, and keeps it and BatchNorm in training form. Uses of operators that cannot
    be expanded go to `refusals` (ModelError HC114 or HC115), which raises the first unless told otherwise.
    With `opening` some axes of inputs are open, and the graph has an input for each size behind the model's.

    Requires: the model is checked, input shapes are static, every node has a unique name.
    Ensures: constants are initializers of the graph, all used; values have names, nodes have names,
    shapes are inferred where they can be; counts of padded outputs are outputs, too
    (`counted/outputs.py`). Raises ModelError HC116 if a pass fails, HC117 if sizes decide what nodes there
    are, HC118 if constants are too large.
    """
    with _told(name):
        refusals = refusals or codes.Refusals()
        inlined = _inlined(
            model, name, folder, unread, weights, for_training=for_training, is_open=opening is not None
        )
        if opening is None:
            return _Folding(inlined, name, for_training, refusals).simplified()

        @functools.cache
        def unfolded() -> ir.Model:
            return _inlined(model, name, folder, unread, weights, for_training=for_training, is_open=True)

        def folded(sizes: Bucket, is_brief: bool) -> ir.Graph:
            """The graph as it first is, constants folded and operators expanded, at these sizes."""
            opening.check(sizes)
            shaped = _with_input_shapes(unfolded().clone(), opening.shapes(sizes))
            refusals = codes.Refusals()
            return _Folding(shaped, name, for_training, refusals, is_open=True, is_brief=is_brief).needed()

        tape = None if for_training else Tape.of(inlined, FOLD_INPUT_ELEMENTS, FOLD_OUTPUT_ELEMENTS)
        folding = _Folding(inlined, name, for_training, refusals, is_open=True)
        folding.follow(opening, folded, tape)
        return folding.simplified()


@contextmanager
def _told(name: str) -> Iterator[None]:
    # What cannot be evaluated stays a node, which needs no warning.
    log = logging.getLogger(_constant_folding.__name__)
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except HybridcError:
        raise
    except Exception as error:  # third-party passes raise anything
        cause = error.__cause__ or error
        raise ModelError(
            codes.SIMPLIFY_FAILED,
            f"cannot simplify the model: {error}: {cause}"
            if cause is not error
            else f"cannot simplify the model: {error}",
            where=name,
            remedy="export the network again with static shapes",
        ) from error
    finally:
        log.disabled = was_disabled


def _inlined(
    proto: onnx.ModelProto,
    name: str,
    folder: Path | None,
    unread: frozenset[str],
    weights: Mapping[str, ir.TensorProtocol],
    *,
    for_training: bool,
    is_open: bool,
) -> ir.Model:
    """The model before anything is folded: if it `is_open`, whatever the shapes of its inputs are."""
    model = ir.from_proto(proto)
    graph = model.graph
    if folder is not None:
        ir.external_data.set_base_dir(graph, folder)
    put_weights(graph, weights)
    leave_unread(graph, unread)
    _drop_initializer_inputs(graph)
    common.InlinePass()(model)
    _make_initializers(graph, name)
    if for_training:
        to_training_form(graph, name)
    _drop_no_ops(graph, keeps_slices=is_open)
    return model


def _with_input_shapes(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> ir.Model:
    for value in model.graph.inputs:
        value.shape = ir.Shape(shapes[value.name or ""])
    return model


class _Folding:
    """A model whose constants are folded, and the pass that has folded them."""

    def __init__(
        self,
        model: ir.Model,
        name: str,
        for_training: bool,
        refusals: codes.Refusals,
        *,
        is_open: bool = False,
        is_brief: bool = False,
    ) -> None:
        """`is_open` if it is compared with the same network of other sizes, `is_brief` if one round may do:
        the second mostly finds nothing. Requires: `model` is inlined."""
        self.model, self.name, self.refusals, self.is_open = model, name, refusals, is_open
        self.keeps_slices = is_open  # those that take all at some sizes only
        self.fold = FoldAndExpand(
            self.model.opset_imports[""],
            name,
            refusals,
            for_training=for_training,
            shape_inference=True,
            input_size_limit=FOLD_INPUT_ELEMENTS,
            output_size_limit=FOLD_OUTPUT_ELEMENTS,
            should_fold=_should_fold,
        )
        self.round()
        # a round sees the shapes that the one before made known; what is not constant then never is
        unknown = self._unknown()
        for _ in range(0 if is_brief and not unknown else _MOST_ROUNDS - 1):
            self.round()
            before, unknown = unknown, self._unknown()
            if unknown in (0, before):
                break

    def round(self) -> None:
        """Fold once more."""
        graph = self.model.graph
        _make_empty_constants(graph)
        with np.errstate(all="ignore"):  # constants overflow here as they would in a run: no warning
            self.fold(self.model)
        _make_initializers(graph, self.name)
        _drop_no_ops(graph, keeps_slices=self.keeps_slices, is_same=self.fold.ledger.is_same)

    def _unknown(self) -> int:
        """How many results have shapes that are not known."""
        results = (value for node in self.model.graph for value in node.outputs)
        return sum(static_shape(value) is None for value in results)

    def _decide_choices(self) -> None:
        """Fold what branches and trips brought until shapes are known; refuse what they never are of."""
        left, unknown = undecided_choices(self.model.graph), self._unknown()
        while left:
            self.round()
            left, before, unknown = undecided_choices(self.model.graph), unknown, self._unknown()
            if unknown >= before:
                break
        for node in left:
            self.fold.refuse_unknown(node)

    def needed(self) -> ir.Graph:
        """The graph without nodes that nothing reads."""
        common.RemoveUnusedNodesPass()(self.model)
        return self.model.graph

    def _refuse_apart(self) -> None:
        """Refuse outputs whose elements are not the first ones along an axis: ModelError HC114."""
        for output in self.model.graph.outputs:
            producer, axes = output.producer(), self.fold.ledger.axes(output)
            if producer is not None and not all(map(self.fold.ledger.is_prefix, axes.values())):
                what = f"output {output.name!r} has an axis that merges one that is not fixed into another"
                where = f"{self.name}: node {origin(producer)!r} ({producer.op_type})"
                sizes = listing_remedy(self.fold.ledger.names(producer))
                remedy = f"export the network without it, or {sizes}"
                self.refusals.add(ModelError(codes.WRONG_RESULT, what, where=where, remedy=remedy), producer)

    def _refuse_other_statistics(self) -> None:
        """Refuse BatchNorm of what has not an entry for each example of a batch whose examples are counted:
        ModelError HC114. Those with entries are right as they are (`passes/training`)."""
        for node in self.model.graph if self.is_open else ():
            if node.op_type == TRAINING_BATCH_NORM and not self.fold.ledger.axes(node.inputs[0]):
                what = "BatchNormalization of what has not an entry for each example"
                where = f"{self.name}: node {origin(node)!r} (BatchNormalization)"
                remedy = "train on whole batches alone: give --batch one number"
                self.refusals.add(ModelError(codes.WRONG_RESULT, what, where=where, remedy=remedy), node)

    def follow(self, opening: Opening, folded: Folded, tape: Tape | None) -> None:
        """Make inputs with open axes padded values; what is `needed` at other sizes is `folded`, or follows
        from the `tape`."""
        opset, ledger = self.fold.opset, self.fold.ledger
        follow_sizes(self.needed(), opening, folded, ledger, opset, self.name, self.refusals, tape)
        self.keeps_slices = False

    def simplified(self) -> ir.Model:
        """The model, with counts of padded values followed to its outputs."""
        model, graph, ledger = self.model, self.model.graph, self.fold.ledger
        self.fold.is_counting = True
        for is_second in (False, True):
            if has_data_extents(graph) or has_choices(graph) or (self.is_open and not is_second):
                self.round()
        self._decide_choices()
        self._refuse_apart()
        self._refuse_other_statistics()
        return_counts(graph, ledger, Builder(self.fold.opset))
        _make_initializers(graph, self.name)
        _merge_equal_weights(graph)
        common.LiftSubgraphInitializersToMainGraphPass()(model)
        common.RemoveUnusedNodesPass()(model)
        common.NameFixPass()(model)
        return model


def _drop_initializer_inputs(graph: ir.Graph) -> None:
    """Before IR version 4 weights were listed as inputs, too."""
    kept = [value for value in graph.inputs if value.name not in graph.initializers]
    graph.inputs.clear()
    graph.inputs.extend(kept)


def _make_initializers(graph: ir.Graph, name: str) -> None:
    """Constant and ConstantOfShape nodes become initializers, the latter without memory: strides are zero."""
    total_bytes = 0
    for node in list(graph):
        if node.op_type == "Constant":
            # not by onnx_ir, which asks whether it is a tensor: that takes longer than all else
            stored = node.attributes.get("value")
            constant = stored.value if stored else ir.convenience.get_const_tensor(node.outputs[0])
            if constant is not None:
                _replace_by_array(graph, node, constant.numpy())
        elif node.op_type == "ConstantOfShape":
            dims = constant_array(node.inputs[0])
            if dims is None or dims.size > MAX_RANK:
                continue
            fill = constant_attribute(node, "value", np.zeros(1, np.float32))
            total_bytes += math.prod(int(dim) for dim in dims) * fill.itemsize
            if total_bytes > MAX_GENERATED_BYTES or (dims < 0).any():
                raise _too_large(dims, node, name)
            _replace_by_array(graph, node, np.broadcast_to(fill.reshape(()), tuple(dims)))


def _merge_equal_weights(graph: ir.Graph) -> None:
    """Have large weights of equal bytes once: exporters write tied ones as often as they are read, and a
    weight that is packed for several products was packed for each of them."""
    alike = dict[tuple[str, tuple[int, ...], bytes], list[tuple[ir.Value, np.ndarray]]]()
    for value in list(graph.initializers.values()):
        array = None if value.const_value is None else value.const_value.numpy()
        if array is None or not _is_compared(array) or value.is_graph_output():
            continue
        content = array.reshape(-1).view(np.uint8)
        # in which most weights differ: of a mapped file no more pages are read
        found = alike.setdefault((str(array.dtype), array.shape, content[:_COMPARED_FIRST].tobytes()), [])
        same = next((other for other, its in found if np.array_equal(its, content)), None)
        if same is None:
            found.append((value, content))
        else:
            ir.convenience.replace_all_uses_with(value, same)


def _is_compared(array: np.ndarray) -> bool:
    """Whether it is large, and has bytes of its own: one number may stand for all of it."""
    is_stored = array.flags.c_contiguous and not array.dtype.hasobject and not is_placeholder(array)
    return is_stored and array.nbytes >= _MERGED_BYTES


def _too_large(dims: np.ndarray, node: ir.Node, name: str) -> ModelError:
    return ModelError(
        codes.TOO_LARGE,
        f"generates a constant of shape {dims.tolist()}; the limit for all constants is"
        f" {MAX_GENERATED_BYTES} bytes",
        where=f"{name}: node {node.name!r} (ConstantOfShape)",
        remedy="store weights in the model",
    )


def _replace_by_array(graph: ir.Graph, node: ir.Node, array: np.ndarray) -> None:
    value = node.outputs[0]
    tensor = ir.Tensor(array, name=value.name)
    constant = ir.Value(
        name=value.name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
    )
    ir.convenience.replace_all_uses_with(value, constant, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    graph.register_initializer(constant)


def _make_empty_constants(graph: ir.Graph) -> None:
    """A value without elements is known, whatever computes it: an empty past that a decoder is fed, too."""
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        shape, is_read = static_shape(value), value.uses() or value.is_graph_output()
        if shape is None or 0 not in shape or value.dtype is None or not is_read:
            continue
        tensor = ir.Tensor(np.empty(shape, value.dtype.numpy()), name=f"{value.name}/empty")
        empty = ir.Value(name=tensor.name, type=value.type, shape=tensor.shape, const_value=tensor)
        ir.convenience.replace_all_uses_with(value, empty, replace_graph_outputs=True)
        graph.register_initializer(empty)


def _drop_no_ops(
    graph: ir.Graph,
    *,
    keeps_slices: bool,
    is_same: Callable[[ir.Value, ir.Value], bool] = lambda source, output: True,
) -> None:
    """Identity, inference Dropout, Cast to the same type, and Slice and Split that take all are replaced by
    their input, unless only one of both `is_same` by what is known of its padding."""
    for node in list(graph):
        source, output = node.inputs[0] if node.inputs else None, _copied(node)
        if keeps_slices and node.op_type in ("Slice", "Split"):
            continue
        if source is not None and output is not None and is_same(source, output):
            ir.convenience.replace_all_uses_with(output, source, replace_graph_outputs=True)
            graph.remove(node, safe=True)


def _copied(node: ir.Node) -> ir.Value | None:
    """The output that is the first input unchanged, where no other one is read."""
    read = [output for output in node.outputs if output.uses() or output.is_graph_output()]
    if len(read) == 1 and _is_no_op(node, read[0]):
        return read[0]
    return None


def _is_no_op(node: ir.Node, output: ir.Value) -> bool:
    if node.op_type == "Cast":
        source = node.inputs[0].dtype if node.inputs[0] is not None else None
        return source is not None and source == node.attributes["to"].as_int()
    if node.op_type == "Dropout":
        training = node.inputs[2] if len(node.inputs) > 2 else None
        off = training is None or (
            training.const_value is not None and not training.const_value.numpy().any()
        )
        return off and output is node.outputs[0]
    if node.op_type in ("Slice", "Split"):
        steps = node.inputs[4] if len(node.inputs) > 4 else None
        forward = steps is None or (steps.const_value is not None and (steps.const_value.numpy() > 0).all())
        shape = static_shape(output)
        return shape is not None and shape == static_shape(node.inputs[0]) and bool(forward)
    return node.op_type == "Identity"


def _should_fold(node: ir.Node) -> bool | None:
    """Fold only what is known to be small before it is computed, or what replaces a weight of one use.

    Weights meet weights, too, if what comes of them is no larger: projections of relative positions. None
    leaves the decision to the pass, whose limits concern the inputs.
    """
    elements = _known_elements(node)
    if elements is None:
        return None if node.op_type in _CHOOSING and not node.domain else False
    inputs = [value for value in node.inputs if value is not None]
    large = [v for v in inputs if v.const_value is not None and v.const_value.size > FOLD_INPUT_ELEMENTS]
    if node.op_type in _REARRANGING and all(len(v.uses()) == 1 and not v.is_graph_output() for v in large):
        return True
    if node.op_type == "Slice" and large and _is_cut_apart(large[0]):
        return True
    if node.op_type in _REARRANGING and _is_unpacked(node.outputs[0]):
        return True
    known = sum(value.const_value.size for value in inputs if value.const_value is not None)
    if large and elements <= known and (node.op_type in _COMPUTING or _ends_in_constants(node)):
        return True
    return None if elements <= FOLD_OUTPUT_ELEMENTS else False


def _is_unpacked(value: ir.Value) -> bool:
    """Whether all that reads it makes another constant of it: as of a table of words that is a view of the
    weights of the last product."""
    readers = [reader.op_type for reader, _ in value.uses()]
    return bool(readers) and not value.is_graph_output() and all(name in _UNPACKING for name in readers)


def _ends_in_constants(node: ir.Node) -> bool:
    """Whether this is a view, and all that reads it, or a view of it, computes with constants alone."""
    (result, *others), readers = node.outputs, [reader for reader, _ in node.outputs[0].uses()]
    if node.op_type not in (*_REARRANGING, "Slice") or others or result.is_graph_output() or not readers:
        return False
    return all(
        all(v is None or v is result or v.const_value is not None for v in reader.inputs)
        and (reader.op_type in _COMPUTING or _ends_in_constants(reader))
        for reader in readers
    )


def _is_cut_apart(weight: ir.Value) -> bool:
    """Only slices are read of it, together no more than it has: they replace it.

    Exporters write the gates of an LSTM in ONNX's order so.
    """
    slices = [node for node, _ in weight.uses()]
    taken = [_known_elements(node) for node in slices]
    return (
        not weight.is_graph_output()
        and weight.const_value is not None
        and all(node.op_type == "Slice" for node in slices)
        and sum(elements or 0 for elements in taken) <= weight.const_value.size
        and None not in taken
    )


def _known_elements(node: ir.Node) -> int | None:
    """Elements of all outputs, None if a shape is not known or one of them is not a tensor."""
    shapes = [static_shape(output) for output in node.outputs]
    known = [shape for shape in shapes if shape is not None]
    return sum(math.prod(shape) for shape in known) if len(known) == len(shapes) else None
