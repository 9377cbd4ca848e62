"""Layout: keep activations of convolutional networks in the blocked layout `[N, C / b, H, W, b]`.

One pass over the bindings. A convolution that gains by it takes blocked input and gives blocked output;
operators that treat each channel separately follow the layout of their operands; all others take plain NCHW.
Conversions are emitted between the two, once per tensor, so a chain of convolutions has none.

Only for targets without a GPU: a GPU would read the same tensors, and its kernels expect NCHW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from hybridc.passes.layout.channel_groups import Groups, joining
from hybridc.passes.layout.state import Blocked, Layout, lanes_of
from hybridc.passes.layout.training_functions import FUNCTION_RULES, NARROW_INPUT
from hybridc.passes.layout.weights import ConvWeight
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    is_op,
    operator_name,
    tensor_dtype,
    tensor_shape,
)
from hybridc.schedules.blocked_operators import (
    ConvWindow,
    DepthToSpace,
    blocked_conv2d,
    blocked_depth_to_space,
    blocked_depthwise,
    blocked_grouped_conv2d,
)
from hybridc.targets import Isa

MINIMUM_REUSE = 24
"""Multiply-adds for each element that a convolution reads and writes, from which on it gains more than the
conversion of its input and output costs."""
PLAIN_GROUPS, BLOCKED_GROUPS = 1.7, 1.2
"""Time per multiply-add of a grouped convolution of plain and of blocked data, relative to a dense one's."""
MOST_SEPARATE_GROUPS = 8
"""Most groups that are computed one by one: each is a kernel of its own."""

Rule = Callable[[Layout, relax.VarBinding], Blocked | relax.Var | None]
"""Gives a binding's result, blocked or a plain variable; None if the rule does not accept the binding."""
POOLS = ("nn.max_pool2d", "nn.avg_pool2d", "nn.adaptive_avg_pool2d", "image.resize2d")


def choose_layout(program: Program, isa: Isa, rules: Sequence[Rule] = ()) -> Program:
    """Replace convolutions and the operators between them by their blocked form. `rules` are tried before
    RULES.

    Requires: `main` canonical.
    Ensures: inputs and outputs of `main` as they were; every binding has origins.
    Raises: nothing of its own.
    """
    return apply_rules(program, isa, (*rules, *RULES))


def apply_rules(program: Program, isa: Isa, rules: Sequence[Rule]) -> Program:
    """Replace each binding by what the first rule that accepts it gives, and leave others as they are.

    Requires, Ensures, Raises: as `choose_layout`.
    """
    builder = ProgramBuilder(program.inputs)
    layout = Layout(builder, isa, builder.take_parameters(program))
    layout.values = {binding.var: binding.value for binding in program.bindings}
    layout.library = {g.name_hint: function for g, function in program.functions.items()}
    for binding in program.bindings:
        layout.origins = program.origins.get(binding.var.name, ())
        result = next((r for rule in rules if (r := rule(layout, binding)) is not None), None)
        if isinstance(result, Blocked):
            layout.blocked[binding.var] = result
        elif result is not None:
            layout.plain[binding.var] = result
        else:
            plain = layout.renamed(binding.value)
            layout.plain[binding.var] = layout.emit(plain, binding.var.name)
    outputs = [layout.renamed(output) for output in program.outputs]
    return layout.builder.finish(outputs, {**program.functions, **layout.functions})


# ------------------------------------------------------------------------------------- convolutions


def _convolution(layout: Layout, binding: relax.VarBinding) -> Blocked | None:
    call = binding.value
    if not is_op(call, "nn.conv2d") or tensor_dtype(call.args[0]) != "float32":
        return None
    attrs = call.attrs
    data, weight = call.args[0], ConvWeight(call.args[1], layout.weight(call.args[1]))
    if (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "OIHW"):
        return None
    window, groups, result = conv_window_of(attrs), int(attrs.groups), tensor_shape(binding.var)
    if groups > 1:
        if weight.shape[1] == 1 and groups == weight.shape[0]:
            return _depthwise(layout, data, weight, window, result)
        if weight.value is None:
            return _group_by_group(layout, data, weight, groups, window, result)
        return _grouped(layout, data, Groups(weight.value, groups), window, result)
    if data not in layout.blocked and not _pays(tensor_shape(data), weight.shape, result):
        return None
    return _dense(layout, data, weight, window, result)


def conv_window_of(attrs: Any) -> ConvWindow:
    """Strides, padding and dilation of a two-dimensional convolution's attributes."""
    sh, sw = (int(stride) for stride in attrs.strides)
    top, left, bottom, right = (int(pad) for pad in attrs.padding)
    dh, dw = (int(step) for step in attrs.dilation)
    return ConvWindow((sh, sw), (top, left, bottom, right), (dh, dw))


def _pays(data: Sequence[int], weight: Sequence[int], result: Sequence[int]) -> bool:
    reads = math.prod(data) if data[1] >= NARROW_INPUT else 0
    multiply_adds = math.prod(result) * math.prod(weight[1:])
    return multiply_adds >= MINIMUM_REUSE * (reads + math.prod(result))


def _dense(
    layout: Layout, data: relax.Expr, weight: ConvWeight, window: ConvWindow, result: Sequence[int]
) -> Blocked:
    outputs, inputs, *_ = weight.shape
    lanes = lanes_of(outputs, layout.isa)
    if data not in layout.blocked and inputs < NARROW_INPUT:
        source, input_lanes = layout.as_plain(data), None
    else:
        found = layout.blocked.get(data) or layout.as_blocked(data, lanes_of(inputs, layout.isa))
        source, input_lanes = found.var, found.lanes
    packed = weight.packed(layout, lanes, input_lanes)
    shapes = tensor_shape(source), tensor_shape(packed), window
    shape = (result[0], -(-outputs // lanes), result[2], result[3], lanes)
    return Blocked(
        layout.call(("conv2d", *shapes), lambda: blocked_conv2d(*shapes), [source, packed], shape), outputs
    )


def _depthwise(
    layout: Layout, data: relax.Expr, weight: ConvWeight, window: ConvWindow, result: Sequence[int]
) -> Blocked | None:
    source = layout.blocked.get(data)
    if source is None:
        return None
    packed = weight.packed_depthwise(layout, source.lanes)
    shapes = tensor_shape(source.var), tensor_shape(packed), window
    shape = (result[0], tensor_shape(source.var)[1], result[2], result[3], source.lanes)
    var = layout.call(("depthwise", *shapes), lambda: blocked_depthwise(*shapes), [source.var, packed], shape)
    return Blocked(var, weight.shape[0])


def _grouped(
    layout: Layout, data: relax.Expr, groups: Groups, window: ConvWindow, result: Sequence[int]
) -> Blocked | None:
    """Blocked if joining groups until they fit vectors takes less time than converting the layout would."""
    shape, found = tensor_shape(data), layout.blocked.get(data)
    input_lanes = lanes_of(shape[1], layout.isa) if found is None else found.lanes
    number, lanes, longer = joining(groups, input_lanes, layout.isa)
    conversions = MINIMUM_REUSE * (math.prod(shape) + math.prod(result)) * (1 if found is None else -1)
    multiply_adds = math.prod(result) * math.prod(groups.weight.shape[1:])
    if multiply_adds * (PLAIN_GROUPS - BLOCKED_GROUPS * longer) < conversions:
        return None
    joined = groups.joined(number)
    if joined.count == 1:
        return _dense(layout, data, ConvWeight(None, joined.weight), window, result)
    source, weight = layout.as_blocked(data, input_lanes).var, joined.filled(lanes)
    key = tensor_shape(source), weight.shape, window, joined.outputs, lanes
    arguments = [source, layout.builder.weight(weight, "weight")]
    blocks = (result[0], len(weight) // lanes, result[2], result[3], lanes)
    var = layout.call(("grouped_conv2d", *key), lambda: blocked_grouped_conv2d(*key), arguments, blocks)
    return Blocked(var, result[1])


def _group_by_group(
    layout: Layout,
    data: relax.Expr,
    weight: ConvWeight,
    groups: int,
    window: ConvWindow,
    result: Sequence[int],
) -> Blocked | None:
    """Weights known only at run time: one convolution per group, for few groups whose channels fill
    blocks."""
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    lanes, input_lanes = (lanes_of(channels, layout.isa) for channels in (outputs, inputs))
    if groups > MOST_SEPARATE_GROUPS or outputs % lanes or inputs % input_lanes:
        return None
    if data not in layout.blocked and not _pays(tensor_shape(data), weight.shape, result):
        return None
    source, packed = layout.as_blocked(data, input_lanes).var, weight.packed(layout, lanes, input_lanes)
    shape = (result[0], outputs // lanes, result[2], result[3], lanes)

    def part(whole: relax.Expr, axis: int, number: int) -> relax.Var:
        size = tensor_shape(whole)[axis] // groups
        cut = relax.op.strided_slice(whole, [axis], [number * size], [(number + 1) * size])
        return layout.emit(cut, "group")

    def convolved(number: int) -> relax.Var:
        x, w = part(source, 1, number), part(packed, 0, number)
        key = tensor_shape(x), tensor_shape(w), window
        return layout.call(("conv2d", *key), lambda: blocked_conv2d(*key), [x, w], shape)

    parts = [convolved(number) for number in range(groups)]
    return Blocked(layout.emit(relax.op.concat(parts, axis=1), "groups"), weight.shape[0])


# ------------------------------------------------------------- what follows the layout of its operands


def _elementwise(layout: Layout, binding: relax.VarBinding) -> Blocked | None:
    """Element-wise operators on blocked operands, per-channel weights and scalars."""
    call = binding.value
    if not has_fact(call, Fact.BLOCKED) or tensor_dtype(binding.var) != "float32":
        return None
    shape = tensor_shape(binding.var)
    leaders = [layout.blocked[a] for a in call.args if a in layout.blocked and tensor_shape(a) == shape]
    if not leaders or (leaders[0].is_filled and not _stays_finite(layout, call)):
        return None
    leader = leaders[0]
    operands = [_operand(layout, a, leader, shape) for a in call.args]
    if any(o is None for o in operands):
        return None
    var = layout.emit(relax.Call(call.op, operands, call.attrs, call.ty_args), binding.var.name)
    return Blocked(var, leader.channels)


def _stays_finite(layout: Layout, call: relax.Call) -> bool:
    """Whether what fills a last block, which is finite, stays so: also in a quotient by a number."""
    if not is_op(call, "divide"):
        return has_fact(call, Fact.FINITE_PADDING)
    divisor = layout.weight(call.args[1])
    return divisor is not None and divisor.size == 1 and bool(divisor.all())


def _operand(layout: Layout, operand: relax.Expr, leader: Blocked, shape: Sequence[int]) -> relax.Expr | None:
    """The other operand of an element-wise operator with a blocked one; None if it has no blocked form."""
    if not isinstance(operand, relax.Var | GenericConst):
        return operand  # a number of clip
    value = layout.weight(operand)
    if value is not None:
        return operand if value.ndim == 0 else _per_channel(layout, value, leader)
    found, own = layout.blocked.get(operand), tensor_shape(operand)
    if found is not None and (found.lanes, found.channels) == (leader.lanes, leader.channels):
        return found.var
    if own[-3:] == (leader.channels, 1, 1) and math.prod(own) == leader.channels and not leader.is_filled:
        return layout.emit(
            relax.op.reshape(layout.as_plain(operand), (1, -1, 1, 1, leader.lanes)), "per_channel"
        )
    per_channel = len(own) == 4 and own[:2] == tuple(shape[:2]) and own[2:] == (1, 1)
    return layout.as_blocked(operand, leader.lanes).var if own == tuple(shape) or per_channel else None


def _per_channel(layout: Layout, value: np.ndarray, leader: Blocked) -> relax.Expr | None:
    """`[C, 1, 1]` as `[CB, 1, 1, b]`, zero in the filling."""
    if value.ndim not in (3, 4) or math.prod(value.shape) not in (1, leader.channels) or value.shape[-1] != 1:
        return None
    if value.size == 1:
        return relax.const(value.reshape(()), value.dtype.name)
    if value.shape[-3] != leader.channels:
        return None
    blocks = tensor_shape(leader.var)[1]
    filled = np.zeros(blocks * leader.lanes, value.dtype)
    filled[: leader.channels] = value.reshape(-1)
    return layout.builder.weight(filled.reshape(1, blocks, 1, 1, leader.lanes), "per_channel")


def _pool(layout: Layout, binding: relax.VarBinding) -> Blocked | None:
    """Pooling and resizing, for which Relax has operators on blocked layouts."""
    call = binding.value
    if not is_op(call, *POOLS) or call.args[0] not in layout.blocked or call.attrs.layout != "NCHW":
        return None
    source, a = layout.blocked[call.args[0]], call.attrs
    name = f"NCHW{source.lanes}c"
    if is_op(call, "image.resize2d"):
        options = (
            [float(v) for v in a.roi],
            name,
            a.method,
            a.coordinate_transformation_mode,
            a.rounding_method,
        )
        numbers = (a.cubic_alpha, a.cubic_exclude, a.extrapolation_value)
        value = relax.op.image.resize2d(source.var, call.args[1], *options, *numbers)
    elif is_op(call, "nn.adaptive_avg_pool2d"):
        value = relax.op.nn.adaptive_avg_pool2d(source.var, a.output_size, name)
    else:
        make = relax.op.nn.max_pool2d if is_op(call, "nn.max_pool2d") else relax.op.nn.avg_pool2d
        window = (a.pool_size, a.strides, a.padding, a.dilation)
        value = make(source.var, *window, a.ceil_mode, a.count_include_pad, name)
    return Blocked(layout.emit(value, binding.var.name), source.channels)


def _mean(layout: Layout, binding: relax.VarBinding) -> Blocked | None:
    """Reductions over both spatial axes, as global average pooling, and perhaps over images."""
    call = binding.value
    if not is_op(call, "mean", "max", "sum") or call.args[0] not in layout.blocked or not call.attrs.keepdims:
        return None
    axes = sorted(int(a) % 4 for a in call.attrs.axis or ())  # counted from the end they would be others
    if axes not in ([2, 3], [0, 2, 3]):
        return None
    source = layout.blocked[call.args[0]]
    reduced = getattr(relax.op, operator_name(call))(source.var, axes, keepdims=True)
    return Blocked(layout.emit(reduced, binding.var.name), source.channels)


def _concat(layout: Layout, binding: relax.VarBinding) -> Blocked | None:
    """Concatenation along the channels, if the channels of every operand are a multiple of the block size."""
    call = binding.value
    if not is_op(call, "concat") or len(tensor_shape(binding.var)) != 4 or int(call.attrs.axis) % 4 != 1:
        return None
    parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else []
    lanes = {layout.blocked[p].lanes for p in parts if p in layout.blocked}
    if not lanes:
        return None
    width = min(lanes)
    if any(tensor_shape(p)[1] % width or layout.weight(p) is not None for p in parts):
        return None
    blocked = [layout.as_blocked(p, width).var for p in parts]
    var = layout.emit(relax.op.concat(blocked, axis=1), binding.var.name)
    return Blocked(var, tensor_shape(binding.var)[1])


def _pixels_only(layout: Layout, binding: relax.VarBinding) -> Blocked | None:
    """Padding of images and rectangles of them, which leave channels where they are."""
    call = binding.value
    if not is_op(call, "nn.pad", "strided_slice") or call.args[0] not in layout.blocked:
        return None
    source = layout.blocked[call.args[0]]
    if is_op(call, "strided_slice"):
        axes, *numbers = ([int(number) for number in field.fields] for field in call.args[1:])
        if tensor_shape(binding.var)[1] != source.channels:
            return None
        kept = [i for i, axis in enumerate(axes) if axis % 4 != 1]
        chosen = ([field[i] for i in kept] for field in numbers)
        value = relax.op.strided_slice(source.var, [axes[i] % 4 for i in kept], *chosen)
    else:
        mode, number = str(call.attrs.pad_mode), float(call.attrs.pad_value)
        widths = [int(width) for width in call.attrs.pad_width]
        # what fills the last block is padded, too, and must stay finite
        if mode != "constant" or any(widths[2:4]) or (source.is_filled and not math.isfinite(number)):
            return None
        value = relax.op.nn.pad(source.var, [*widths, 0, 0], mode, number)
    return Blocked(layout.emit(value, binding.var.name), source.channels)


def _depth_to_space(layout: Layout, binding: relax.VarBinding) -> Blocked | None:
    """`reshape(permute_dims(reshape(x)))` of blocked x that moves channels into squares of pixels, or a slice
    of the resulting image.

    The results of the inner operators for plain data are dropped as unused bindings.
    """
    outer, first = binding.value, _first_pixel(binding)
    if first is not None:
        outer = layout.values.get(outer.args[0])
    permute: Any = layout.values.get(outer.args[0]) if is_op(outer, "reshape") else None
    inner: Any = layout.values.get(permute.args[0]) if is_op(permute, "permute_dims") else None
    source = layout.blocked.get(inner.args[0]) if is_op(inner, "reshape") else None
    if source is None or len(tensor_shape(permute.args[0])) != 6 or permute.attrs.axes is None:
        return None
    axes = tuple(int(a) for a in permute.attrs.axes)
    n, one, two, three, h, w = tensor_shape(permute.args[0])
    depth_first = axes == (0, 3, 4, 1, 5, 2)
    channels, block, other = (three, one, two) if depth_first else (one, two, three)
    if not (depth_first or axes == (0, 1, 4, 2, 5, 3)) or block != other:
        return None
    image = binding.var if first is None else binding.value.args[0]
    whole = (n, channels, h * block, w * block)
    if tensor_shape(inner.args[0])[2:] != (h, w) or tensor_shape(image) != whole:
        return None
    lanes, data = lanes_of(channels, layout.isa), tensor_shape(source.var)
    _, _, rows, columns = tensor_shape(binding.var)
    moved = DepthToSpace(channels, block, depth_first, first or (0, 0), (rows, columns))
    key = ("depth_to_space", data, lanes, moved)
    shape = (n, -(-channels // lanes), rows, columns, lanes)
    made = layout.call(key, lambda: blocked_depth_to_space(data, lanes, moved), [source.var], shape)
    return Blocked(made, channels)


def _first_pixel(binding: relax.VarBinding) -> tuple[int, int] | None:
    """The first pixel of the rectangle that a `strided_slice` takes of images; None for anything else."""
    call = binding.value
    if not is_op(call, "strided_slice") or len(call.args) != 4:
        return None
    axes, begins = ([int(value) for value in field.fields] for field in call.args[1:3])
    return (begins[0], begins[1]) if axes == [2, 3] and min(begins) >= 0 else None


RULES: tuple[Rule, ...] = (
    _convolution,
    _elementwise,
    _pool,
    _mean,
    _concat,
    _depth_to_space,
    _pixels_only,
    *FUNCTION_RULES,
)
"""Tried in this order on every binding; a binding that no rule accepts is copied."""
