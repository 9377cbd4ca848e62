"""Damage to ONNX files: bytes, any field of the protobuf message, and what only a graph can have wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto, defs, numpy_helper

INTEGERS = (0, 1, -1, 2, 3, -2, 4, 7, 64, -64, 2**31 - 1, -(2**31), 2**31, 2**38, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *(
        "",
        " ",
        "x",
        "é" * 9,
        "a" * 5000,
        "a\nb",
        "a\0b",
        "../secret",
        "/etc/passwd",
        "/dev/zero",
        "weights.bin",
    ),
    *("ai.onnx", "com.microsoft", "NOTSET", "SAME_UPPER", "linear", "cubic", "max", "location", "0", "-1"),
)
OPERATORS = tuple(sorted({schema.name for schema in defs.get_all_schemas()}))
_INTEGER_TYPES = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
_SMALL_TYPES = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_ENUM)
_FLOAT_TYPES = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)


def mutated(model: onnx.ModelProto, random: Random) -> bytes:
    """A file like the model's, with one to three things wrong."""
    if random.random() < 0.2:
        return _with_damaged_bytes(model.SerializeToString(), random)
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(_WAYS)(changed, random)
    try:
        return changed.SerializeToString()
    except Exception:  # text that is no UTF-8 or a message that is too large
        return model.SerializeToString()


def _with_damaged_bytes(data: bytes, random: Random) -> bytes:
    damaged = bytearray(data)
    way = random.randrange(4)
    begin = random.randrange(len(damaged))
    end = min(len(damaged), begin + random.choice((1, 2, 8, 64)))
    if way == 0:
        del damaged[begin:]
    elif way == 1:
        del damaged[begin:end]
    elif way == 2:
        damaged[begin:begin] = damaged[begin:end]
    else:
        for _ in range(random.choice((1, 1, 2, 8))):
            damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)


# --------------------------------------------------------------------------------- any field of the message


def change_field(model: onnx.ModelProto, random: Random) -> None:
    """Another value for one scalar field, or another list for one repeated field."""
    message, field = random.choice(list(_fields(model)))
    values = getattr(message, field.name)
    if not field.is_repeated:
        if field.type == FieldDescriptor.TYPE_MESSAGE or random.random() < 0.2:
            message.ClearField(field.name)
        else:
            _assign(message, field, _value(field, values, random))
        return
    way, i = random.randrange(4), random.randrange(len(values))
    if way == 0:
        del values[i]
    elif way == 1:
        j = random.randrange(len(values))
        copied = [*values]
        copied[i], copied[j] = copied[j], copied[i]
        _set_all(message, field, copied)
    elif way == 2 or field.type == FieldDescriptor.TYPE_MESSAGE:
        _set_all(message, field, [*values, values[i]])
    else:
        values[i] = _value(field, values[i], random)


def _fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Every field that is set, in the message and those within it."""
    for field, value in message.ListFields():
        yield message, field
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield from _fields(inner)


def _value(field: FieldDescriptor, old: Any, random: Random) -> Any:
    if field.type in _INTEGER_TYPES:
        return random.choice((*INTEGERS, old + 1, old - 1, old * 2))
    if field.type in _SMALL_TYPES:
        return random.randrange(0, 25)
    if field.type in _FLOAT_TYPES:
        return random.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes(old, random)
    return random.choice(TEXTS)


def _bytes(old: bytes, random: Random) -> bytes:
    """Data of a tensor, most often of the length that it had."""
    i = random.randrange(len(old) + 1)
    return random.choice(
        (b"", old[:i], old + old[:i], b"\xff" * len(old), b"\0" * len(old), old[i:] + old[:i])
    )


def _assign(message: Message, field: FieldDescriptor, value: Any) -> None:
    try:
        setattr(message, field.name, value)
    except (TypeError, ValueError):  # out of the field's range
        message.ClearField(field.name)


def _set_all(message: Message, field: FieldDescriptor, values: list[Any]) -> None:
    kept = [_copy(value) for value in values]
    message.ClearField(field.name)
    getattr(message, field.name).extend(kept)


def _copy(value: Any) -> Any:
    if not isinstance(value, Message):
        return value
    copied = type(value)()
    copied.CopyFrom(value)
    return copied


# -------------------------------------------------------------------------------------- nodes and their names


def change_operator(model: onnx.ModelProto, random: Random) -> None:
    """Another operator for a node; half the time one that takes as many inputs."""
    node = random.choice(model.graph.node) if model.graph.node else None
    if node is not None:
        node.op_type = random.choice(_ALIKE if random.random() < 0.5 else OPERATORS)


_ALIKE = (
    *(
        "Relu",
        "Neg",
        "Sqrt",
        "Log",
        "Exp",
        "Sign",
        "Floor",
        "Identity",
        "Not",
        "IsNaN",
        "Reciprocal",
        "Softmax",
    ),
    *("Add", "Sub", "Mul", "Div", "Mod", "Pow", "Max", "Min", "Equal", "Greater", "And", "BitShift", "PRelu"),
    *("MatMul", "Gemm", "Concat", "Reshape", "Expand", "Tile", "Gather", "GatherND", "Where", "ScatterND"),
    *(
        "ReduceSum",
        "ReduceMax",
        "ArgMax",
        "CumSum",
        "TopK",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Slice",
        "Pad",
    ),
)


def change_operand(model: onnx.ModelProto, random: Random) -> None:
    """A node reads another value, perhaps its own result or a later one; or an input more, or less."""
    nodes = [node for node in model.graph.node if node.input]
    if not nodes:
        return
    node = random.choice(nodes)
    names = ["", "missing", *(t.name for t in model.graph.initializer), *(v.name for v in model.graph.input)]
    names += [output for other in model.graph.node for output in other.output]
    way = random.randrange(6)
    if way == 0:
        node.input.append(random.choice(names))
    elif way == 1:
        del node.input[random.randrange(len(node.input))]
    else:
        node.input[random.randrange(len(node.input))] = random.choice(names)


def change_result(model: onnx.ModelProto, random: Random) -> None:
    """A model's output is another value, or a node's output has another name."""
    names = [output for node in model.graph.node for output in node.output]
    names += [value.name for value in (*model.graph.input, *model.graph.initializer)]
    nodes = [node for node in model.graph.node if node.output]
    if random.random() < 0.5 and nodes:
        node = random.choice(nodes)
        node.output[random.randrange(len(node.output))] = random.choice([*names, "", "new"])
    elif model.graph.output and names:
        output = random.choice(model.graph.output)
        output.name = random.choice(names)


def change_shape(model: onnx.ModelProto, random: Random) -> None:
    """Another dimension or rank of an input, an output or an initializer (whose data stay as they are)."""
    values = [*model.graph.input, *model.graph.output]
    if random.random() < 0.5 and model.graph.initializer:
        dims = random.choice(model.graph.initializer).dims
        if dims and random.random() < 0.7:
            dims[random.randrange(len(dims))] = random.choice(INTEGERS)
        else:
            dims.insert(0, random.choice((0, 1, 1, 2)))
    elif values:
        shape = random.choice(values).type.tensor_type.shape
        if shape.dim and random.random() < 0.8:
            dim = random.choice(shape.dim)
            if random.random() < 0.2:
                dim.dim_param = random.choice(("n", "batch", ""))
            else:
                dim.dim_value = random.choice(INTEGERS)
        else:
            shape.dim.add().dim_value = random.choice((0, 1, 2, 2**31))


def change_values(model: onnx.ModelProto, random: Random) -> None:
    """Other numbers in an initializer of the same shape: zeros, NaN, infinity, limits, axes out of range."""
    weights = [t for t in model.graph.initializer if t.data_location != TensorProto.EXTERNAL]
    if not weights:
        return
    weight = random.choice(weights)
    try:
        array = numpy_helper.to_array(weight).copy()
    except Exception:  # damaged before
        return
    if not array.size or array.dtype.kind not in "iuf":
        return
    if array.dtype.kind == "f":
        new = random.choice(FLOATS)
    else:
        limits = np.iinfo(array.dtype)
        new = min(max(random.choice(INTEGERS), limits.min), limits.max)
    with np.errstate(all="ignore"):
        if random.random() < 0.5:
            array[...] = new
        else:
            array.flat[random.randrange(array.size)] = new
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))


def change_type(model: onnx.ModelProto, random: Random) -> None:
    """Another element type of an input, an output or an initializer, with data to match or not."""
    new = random.randrange(0, 25)
    if random.random() < 0.5 and model.graph.initializer:
        weight = random.choice(model.graph.initializer)
        dtypes = (np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_)
        try:
            with np.errstate(all="ignore"):
                array = numpy_helper.to_array(weight).astype(random.choice(dtypes))
        except Exception:  # damaged before
            weight.data_type = new
            return
        weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    else:
        values = [*model.graph.input, *model.graph.output]
        if values:
            random.choice(values).type.tensor_type.elem_type = new


def externalise(model: onnx.ModelProto, random: Random) -> None:
    """Data of an initializer in another file: one that is there (`weights.bin`), missing, or none of ours."""
    if not model.graph.initializer:
        return
    weight = random.choice(model.graph.initializer)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, values in (
        ("location", ("weights.bin", *TEXTS)),
        ("offset", ("0", "0", "64", "-1", "99999999999", "x")),
        ("length", ("0", "16", "4096", "-1", "99999999999", "x")),
    ):
        if key == "location" or random.random() < 0.4:
            entry = weight.external_data.add()
            entry.key, entry.value = key, random.choice(values)


def shuffle_nodes(model: onnx.ModelProto, random: Random) -> None:
    """The nodes in another order."""
    nodes = [_copy(node) for node in model.graph.node]
    random.shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def change_opset(model: onnx.ModelProto, random: Random) -> None:
    """Another opset or IR version."""
    if model.opset_import and random.random() < 0.8:
        random.choice(model.opset_import).version = random.choice((*range(1, 28), *INTEGERS))
    else:
        model.ir_version = random.choice((0, 1, 3, 4, 8, 12, 99, 2**62))


_WAYS: tuple[Callable[[onnx.ModelProto, Random], None], ...] = (
    *(change_field,) * 6,
    *(change_operator, change_operand, change_result, change_shape, change_values, change_type) * 2,
    *(externalise, shuffle_nodes, change_opset),
)


def parses(data: bytes) -> bool:
    """Whether the bytes are an ONNX message at all."""
    try:
        onnx.ModelProto().ParseFromString(data)
    except (DecodeError, RuntimeError, ValueError):
        return False
    return True
