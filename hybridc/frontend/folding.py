"""Constants folded, shapes inferred and operators expanded, in one walk over the nodes in order."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.optimizer import _constant_folding as folding

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.counted.ledger import TRUSTED, Ledger
from hybridc.frontend.counted.rewrites import OPENING, REWRITES, Rewrite, rewritten
from hybridc.frontend.counted.rules import RULES
from hybridc.frontend.counted.sources import SOURCES
from hybridc.frontend.expand.builder import ORIGIN, Builder, Expansion, NotYet, Unsupported
from hybridc.frontend.expand.control.choices import CHOICE, CHOICES, Inlining, check_choice
from hybridc.frontend.expand.control.copies import discard
from hybridc.frontend.expand.control.sequences import SEQUENCES, Known, Step
from hybridc.frontend.expand.table import EXPANSIONS
from hybridc.frontend.inference import MOST_READ, computed, inferred, note_computed
from hybridc.frontend.parameters import TRAINING_BATCH_NORM, TRAINING_DROPOUT
from hybridc.frontend.restrictions import remedy_of_choice
from hybridc.frontend.values import constant_array, constant_attribute, static_shape
from hybridc.placeholders import is_placeholder, placeholder
from hybridc.sizes import listing_remedy, named_text

_WRONGLY_FOLDED = ("CastLike", "ConcatFromSequence", "SplitToSequence")
"""By the pass, which forgets how a cast saturates; in forms that older opsets do not have; and it squeezes
parts whose sizes are given."""
_UNKNOWN = "cannot read what has an extent that is not fixed"
_READING_SIZES = ("Gather", "Slice")
"""Operators whose constants may depend on sizes: their rule looks at them."""
_KNOWN_BY_EXTENTS = ("Expand", "Reshape", "Resize", "Tile", "TopK")
"""Operators whose constants say no more than the extents of the result, which are checked."""
_WITH_BODIES = ("If", "Loop", "Scan", "SequenceMap")
"""Operators that have graphs for attributes."""
_SHARED_BYTES = 4096
"""Constants that it pays to store once."""
_SHAPED_AS_INPUT = ("GroupNormalization", TRAINING_BATCH_NORM, TRAINING_DROPOUT)
"""Operators for which onnx infers nothing: their result has the shape of their first input."""


class FoldAndExpand(folding.FoldConstantsPass):
    """A node that is expanded is replaced by nodes that the same walk visits next, so that those behind them
    know their shapes. A use that cannot be expanded goes to `refusals`, as ModelError HC114 or HC115.
    `limits` are those of folding. `for_training` makes weights of few bits float32, of which products have
    gradients, and leaves branches and trips that data decide: a gradient of what is not taken may be NaN.

    Once `is_counting`, what is not constant by then is padded where data determine its extent; `ledger` knows
    which values are. Of an If or a Loop that depends on it all is inlined (`expand/control/choices.py`).
    """

    def __init__(
        self, opset: int, name: str, refusals: codes.Refusals, *, for_training: bool = False, **limits: Any
    ) -> None:
        super().__init__(**limits)
        self.for_training = for_training
        self.opset, self.name, self.refusals = opset, name, refusals
        self._refused = set[ir.Node]()
        self._constants = Counter[str]()
        self.is_counting = False
        self.ledger = Ledger()
        self.sequences: Known = {}

    def process_node(self, node: ir.Node, is_function: bool) -> folding.Replacement | None:
        """What replaces the node, if anything does."""
        replacement = self._process(node, is_function)
        results = node.outputs if replacement is None else replacement.new_outputs
        if replacement is not None:
            self.ledger.replace(node.outputs, results)
            if node.op_type == "If" and not node.domain:
                _discard_branches(node)
        elif node.op_type == "Identity" and not self.ledger.is_same(node.inputs[0], node.outputs[0]):
            # stands for itself: whoever read the operand instead would see no padding
            self._state.set_sym_value(node.outputs[0], node.outputs[0])
        if self.is_counting:
            self._check_extents(node, results)
        return replacement

    def _process(self, node: ir.Node, is_function: bool) -> folding.Replacement | None:
        knows_padding = TRUSTED in node.meta
        is_padded = self.ledger.is_padded(node) and not knows_padding
        if is_padded and any(map(self.ledger.varying, node.inputs)) and not self._is_explained(node):
            what = f"{node.op_type} is given a constant that depends on sizes of open dimensions"
            names = dict.fromkeys(name for value in node.inputs for name in self.ledger.deciding(value))
            self._refuse(node, codes.WRONG_RESULT, what, None, names=tuple(names))
            return None
        if is_padded and node.op_type in REWRITES:  # before a shape is taken for one of constants
            replacement = self._expanded(node, self._rewriting(REWRITES[node.op_type]), is_last=True)
            if replacement is not None or node.op_type not in RULES or node in self._refused:
                return replacement
        if node.op_type in _WRONGLY_FOLDED:
            sequence = SEQUENCES.get(node.op_type)
            return self._expanded(
                node, EXPANSIONS[("", node.op_type)] if sequence is None else self._listing(sequence)
            )
        replacement = self._folded(node, is_function)
        if replacement is None:
            self._check_choice(node)
        like = node.inputs[0] if node.op_type in _SHAPED_AS_INPUT else None
        if like is not None and static_shape(node.outputs[0]) is None:  # of an earlier round, perhaps
            node.outputs[0].shape = like.shape
            node.outputs[0].type = node.outputs[0].type or like.type
        expansion = EXPANSIONS.get((node.domain, node.op_type))
        if self.is_counting and replacement is None and not knows_padding:
            source = SOURCES.get(node.op_type) or OPENING.get(node.op_type)
            expansion = expansion if source is None else self._rewriting(source)
            if node.op_type in CHOICES and not self.for_training:
                return self._expanded(node, self._inlining(CHOICES[node.op_type]))
        sequence = None if node.domain else SEQUENCES.get(node.op_type)
        if sequence is not None and replacement is None:
            expansion = self._listing(sequence)
        if is_padded and node.op_type not in SOURCES:
            if node.op_type in RULES:
                self._follow(node)
            elif expansion is None or replacement is not None:
                self._refuse(node, codes.WRONG_RESULT, f"{node.op_type} {_UNKNOWN}", None)
        if replacement is not None or expansion is None or node in self._refused:
            return replacement
        return self._expanded(node, expansion)

    def _folded(self, node: ir.Node, is_function: bool) -> folding.Replacement | None:
        """What the pass does, which computes each number anew; it still does so where that is not its only
        result."""
        if self._is_only_inferred(node):
            self._do_inference(node)
            return None
        version, graph = self._opset_imports.get(node.domain, 0), node.graph
        known = _shape_read(node)
        known = _filled(node) if known is None else known
        known = computed(node, version) if known is None and isinstance(graph, ir.Graph) else known
        known = self._unread(node) if known is None else known
        if known is not None and isinstance(graph, ir.Graph):
            [output] = node.outputs
            tensor = ir.Tensor(known, name=output.name)
            kind = ir.TensorType(tensor.dtype)
            value = ir.Value(name=output.name, type=kind, shape=tensor.shape, const_value=tensor)
            # which the pass prefers to those of what replaces it
            output.type, output.shape = kind, value.shape
            graph.register_initializer(value)
            return folding.Replacement([value], [])
        replacement = super().process_node(node, is_function)
        if replacement is not None and not replacement.new_nodes:
            [*results] = replacement.new_outputs
            if len(results) == 1 and results[0].const_value is not None:
                node.outputs[0].shape = results[0].shape  # as above: inference may know less of it
                note_computed(node, version, results[0].const_value.numpy())
        return replacement

    def _is_only_inferred(self, node: ir.Node) -> bool:
        """Whether the pass does no more with a node than to infer what its results are; takes what the pass
        found to be equal for its operands."""
        is_evaluated = (node.domain, node.op_type) in folding.registry.op_evaluators
        if node.domain or node.op_type in _WITH_BODIES or is_evaluated:
            return False
        for position, value in enumerate(node.inputs):
            same = self._state.get_sym_value(value)
            if same is not None and isinstance(same, ir.Value):
                node.replace_input_with(position, same)
                self._modified = True
        return any(value is not None and value.const_value is None for value in node.inputs)

    def _unread(self, node: ir.Node) -> np.ndarray | None:
        """A placeholder for what would be folded of weights that are not read."""
        operands = [value.const_value for value in node.inputs if value is not None]
        if len(node.outputs) != 1 or None in operands or not any(map(self._is_unread, operands)):
            return None
        self._do_inference(node)
        [output] = node.outputs
        shape = static_shape(output)
        if shape is None or output.dtype is None or not self.should_fold(node):
            return None
        return placeholder(shape, output.dtype.numpy())

    def _is_unread(self, tensor: ir.TensorProtocol | None) -> bool:
        if not isinstance(tensor, ir.Tensor) or tensor.size <= self.input_size_limit:
            return False
        return is_placeholder(tensor.numpy())

    def _do_inference(self, node: ir.Node) -> None:
        """What the pass does, which asks onnx anew for each node; it still does so where that may fail.

        Of results whose types and extents are known, as most are in a second round, nothing is left to ask.
        """
        if all(value.type is not None and static_shape(value) is not None for value in node.outputs):
            return
        results = inferred(node, self._opset_imports.get(node.domain, 0))
        if results is None:
            super()._do_inference(node)
            return
        for output, result in zip(node.outputs, results, strict=True):
            if result is not None:
                dtype, shape = result
                try:
                    output.shape = folding._merge_shapes(output.shape, shape)
                except ValueError:  # of another rank than the model states: the pass stops there, too
                    return
                output.type = ir.TensorType(dtype)

    def _check_choice(self, node: ir.Node) -> None:
        """Refuse a choice between values of different shapes, or of different padding; of shapes that are not
        known a later round may know more."""
        if CHOICE not in node.meta:
            return
        taken, other = (self.ledger.axes(value) for value in node.inputs[1:])
        try:
            if taken != other:
                raise Unsupported(
                    f"cannot choose: {node.meta[CHOICE]} have different extents that are not fixed"
                )
            check_choice(node)
        except Unsupported as error:
            self._refuse(node, codes.WRONG_RESULT, f"{node.op_type} {error}", None)
        except NotYet:
            pass

    def refuse_unknown(self, node: ir.Node) -> None:
        """Refuse a choice between values whose shapes no round has made known."""
        self._refuse(node, codes.WRONG_RESULT, f"{node.op_type} {_UNKNOWN}", None)

    def _is_explained(self, node: ir.Node) -> bool:
        """Whether the rule of a node knows what constants that depend on sizes are at these."""
        is_known = node.op_type in _KNOWN_BY_EXTENTS and self.ledger.is_sampled(node.outputs[0])
        return is_known or node.op_type in _READING_SIZES

    def visit_attribute(self, attr: ir.Attr) -> None:
        """Nothing: the nodes of a body are visited where they are inlined."""

    def _rewriting(self, rewrite: Rewrite) -> Expansion:
        return lambda node, build: rewritten(rewrite, node, build, self.ledger)

    def _inlining(self, inline: Inlining) -> Expansion:
        def pad(value: ir.Value, count: ir.Value) -> ir.Value:
            return self.ledger.mark(value, {0: self.ledger.add(count)})

        return lambda node, build: inline(node, build, pad)

    def _listing(self, step: Step) -> Expansion:
        return lambda node, build: step(node, build, self.sequences)

    def _follow(self, node: ir.Node) -> None:
        """Tell the ledger of the results of a node that leaves padding where it is."""
        taken = [self.ledger.axes(value) for value in node.inputs]
        try:
            for output, axes in zip(node.outputs, RULES[node.op_type](node, taken), strict=False):
                self.ledger.mark(output, axes)
            if node.op_type == "Where":
                self.ledger.choose(node.outputs[0], node.inputs[1:])
        except NotYet:
            self._refuse(node, codes.WRONG_RESULT, f"{node.op_type} {_UNKNOWN}", None)
        except Unsupported as error:
            self._refuse(node, codes.WRONG_RESULT, f"{node.op_type} {error}", None)

    def _check_extents(self, node: ir.Node, results: Sequence[ir.Value | None]) -> None:
        """Refuse a node whose results have other extents, at some sizes of open dimensions, than is known."""
        for result in results:
            axis = None if result is None else self.ledger.unexplained(result)
            if axis is not None:
                what = f"{node.op_type} gives axis {axis} an extent that is no simple function of a size"
                self._refuse(node, codes.WRONG_RESULT, what, None)

    def _expanded(
        self, node: ir.Node, expansion: Expansion, *, is_last: bool = False
    ) -> folding.Replacement | None:
        """What an expansion makes; `is_last` if what is not known yet never will be."""
        build = Builder(self.opset, for_training=self.for_training)
        try:
            results = expansion(node, build)
        except NotYet:
            if is_last:
                self._refuse(node, codes.WRONG_RESULT, f"{node.op_type} {_UNKNOWN}", None)
            return None
        except Unsupported as error:
            what = f"{node.op_type} {error}"
            self._refuse(node, codes.WRONG_RESULT, what, None, remedy=error.remedy)
            return None
        except Exception as error:  # attributes and shapes that no checker has seen may be anything
            what = f"cannot expand the node: {type(error).__name__}: {error}"
            self._refuse(node, codes.IMPORT_FAILED, what, error)
            return None
        if results is None:
            return None
        values = _all_results(node, results, build)
        for made in build.nodes:
            made.name = f"{origin(node)}/{made.op_type}"
            made.meta[ORIGIN] = origin(node)
        self._name_constants(origin(node), build.nodes)
        return folding.Replacement(values, build.nodes)

    def _name_constants(self, where: str, nodes: Sequence[ir.Node]) -> None:
        """Large ones after the node they are of: buckets of sizes, which number values differently, share
        weights of one name."""
        for node in nodes:
            tensor = ir.convenience.get_const_tensor(node.outputs[0]) if node.op_type == "Constant" else None
            if tensor is not None and tensor.nbytes >= _SHARED_BYTES:
                node.outputs[0].name = f"{where}/hybridc.constant_{self._constants[where]}"
                self._constants[where] += 1

    def _refuse(
        self,
        node: ir.Node,
        code: str,
        what: str,
        cause: Exception | None,
        names: tuple[str, ...] = (),
        remedy: str | None = None,
    ) -> None:
        """Once for a node, which stays as it is: those behind it are looked at with the shapes that ONNX
        infers. `names` are open dimensions that are to blame, those that operands are padded by if none."""
        if node in self._refused:
            return
        where = f"{self.name}: node {origin(node)!r} ({node.op_type})"
        if remedy is None:
            remedy = remedy_of_choice(node) if CHOICE in node.meta else "export the network without it"
        names = names or (self.ledger.names(node) if self.is_counting else ())
        if names:
            what += named_text(names)
            remedy = listing_remedy(names)
            if self.for_training:
                remedy = "train on whole batches alone: give --batch one number"
        error = ModelError(code, what, where=where, remedy=remedy)
        error.__cause__, error.__suppress_context__ = cause, True
        self._refused.add(node)
        self.refusals.add(error, node)


def _discard_branches(node: ir.Node) -> None:
    """Of an If whose condition is known, in front of which are nodes that nothing else reads."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            discard(attribute.as_graph())


def _shape_read(node: ir.Node) -> np.ndarray | None:
    """What a Shape returns, if that is known. The pass would make a node for it."""
    source = node.inputs[0] if node.op_type == "Shape" and not node.domain else None
    if source is None or source.shape is None:
        return None
    dims = source.shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
    return np.array(dims, np.int64) if all(isinstance(dim, int) for dim in dims) else None


def _filled(node: ir.Node) -> np.ndarray | None:
    """What a ConstantOfShape makes if that is few numbers, which decide shapes: the pass leaves them all, and
    what reads them waits for another round."""
    dims = constant_array(node.inputs[0]) if node.op_type == "ConstantOfShape" and not node.domain else None
    if dims is None or (dims < 0).any() or math.prod(dims.tolist()) > MOST_READ:
        return None
    fill = constant_attribute(node, "value", np.zeros(1, np.float32))
    return np.full(tuple(dims), fill.reshape(()), fill.dtype)


def origin(node: ir.Node) -> str:
    """The name of the user's node that the node is, or is a part of."""
    return node.meta.get(ORIGIN) or node.name or node.op_type


def _all_results(node: ir.Node, results: Sequence[ir.Value | None], build: Builder) -> Sequence[ir.Value]:
    """A value of its own for each output: it takes the old one's name. What nothing uses is dropped later."""
    spare = next(value for value in results if value is not None)
    values: list[ir.Value] = []
    for _, value in itertools.zip_longest(node.outputs, results[: len(node.outputs)]):
        is_own = value is not None and value not in values and value.producer() in build.nodes
        values.append(value if value is not None and is_own else build.op("Identity", value or spare))
    return values
