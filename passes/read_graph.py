"""Make the `Graph` of a fused program: kernels, tensors, costs, what may be overwritten."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import tvm
from tvm import relax, s_tir, tirx
from tvm_ffi import structural_equal, structural_walk

from hybridc.appended_rows import is_appended_rows
from hybridc.checks import CHECKS, checked_inputs
from hybridc.errors import InternalError
from hybridc.ir import Check, CheckKind, Device, Graph, Kernel, Role, Tensor
from hybridc.ir.graph import OTHER_FAMILY, dtype_bits
from hybridc.ir.plan import align
from hybridc.passes.program.choices import choice_of
from hybridc.passes.program.means import has_means_of_ranks
from hybridc.passes.program.program import Program, is_op, tensor_dtype, tensor_shape
from hybridc.schedules.channels_last import channels_last
from hybridc.schedules.rule import PRECISION, PRECISION_NOTE, Scheduled


def read_graph(
    program: Program,
    scheduled: Mapping[tuple[str, Device], Scheduled],
    loop_carried: Sequence[tuple[int, int]] = (),
) -> Graph:
    """The graph of a fused program. `loop_carried` are positions of inputs, and of the outputs whose
    values they have in the next run.

    Requires: every binding of `main` is a `call_tir`, a reshape or a projection; `scheduled` holds the
    functions for each device of the target, with their workspace.
    Ensures: views have no tensor of their own: kernels and outputs name the tensor whose bytes they see.
    Raises: InternalError HC914 if a function takes a tensor to have another layout than it has.
    """
    functions = {g.name_hint: f for g, f in program.module.functions.items() if isinstance(f, tirx.PrimFunc)}
    facts = {name: _facts(name, function, scheduled) for name, function in functions.items()}
    tensors: dict[str, Tensor] = {}
    names: dict[relax.Var, tuple[str, ...]] = {}
    for var in program.main.params:
        role = Role.WEIGHT if var.name in program.weights else Role.INPUT
        tensors[var.name] = Tensor(var.name, tensor_shape(var), tensor_dtype(var), role)
        names[var] = (var.name,)

    values = {b.var: b.value for b in program.bindings}
    outputs = {name for expr in program.outputs for name in _output_names(expr, values)}
    kernels: list[Kernel] = []
    for binding in program.bindings:
        value = binding.value
        if isinstance(value, relax.TupleGetItem):
            names[binding.var] = (names[value.tuple_value][value.index],)
        elif is_op(value, "reshape"):
            names[binding.var] = names[value.args[0]]
        else:
            function = functions[value.args[0].name_hint]
            results = _result_tensors(binding.var, outputs)
            last = channels_last(function)
            if len(function.params) - 1 in last:
                results = [replace(results[0], channels_last=True)]
            tensors.update((t.name, t) for t in results)
            names[binding.var] = tuple(t.name for t in results)
            inputs = tuple(names[argument][0] for argument in value.args[1].fields)
            for i, name in enumerate(inputs):
                if tensors[name].channels_last is not (i in last):
                    raise InternalError("HC914", f"{binding.var.name} does not read {name} as it lies")
            origins = program.origins[binding.var.name]
            kernel = _kernel(binding.var.name, inputs, results, origins, facts[value.args[0].name_hint])
            kernels.append(_states_first(_each_once(kernel, tensors), tensors))
    graph = Graph(
        kernels=tuple(kernels),
        tensors=tuple(tensors.values()),
        inputs=tuple(v.name for v in program.inputs),
        outputs=tuple(names[expr][0] for expr in program.outputs),
    )
    return replace(graph, loop_carried=(*_carried(graph, loop_carried), *_caches(graph)))


def _caches(graph: Graph) -> Iterator[tuple[str, str]]:
    """A past that is fed, of which one kernel alone replaces rows; and the output that it makes of it."""
    for kernel in graph.kernels:
        if not kernel.appends:
            continue
        old, (new,) = kernel.inputs[0], kernel.outputs
        alone = len(graph.consumers[old]) == 1 and graph.outputs.count(new) == 1 and old not in graph.outputs
        if alone and old in graph.inputs and (new, old) in kernel.may_overwrite:
            yield old, new


def _carried(graph: Graph, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """Pairs of tensors of one type whose output is written by a kernel and is an output only once."""
    for old, new in ((graph.inputs[i], graph.outputs[o]) for i, o in pairs):
        types = [(graph.tensor[name].shape, graph.tensor[name].dtype) for name in (old, new)]
        alone = graph.outputs.count(new) == 1 and old not in graph.outputs
        if new in graph.producer and alone and types[0] == types[1]:
            yield old, new


def _output_names(expr: relax.Expr, values: Mapping[relax.Var, relax.Expr]) -> Iterator[str]:
    """The tensor, and the views on the way to it, that an output of the model names."""
    while True:
        value = values.get(expr)
        if isinstance(value, relax.TupleGetItem):
            yield f"{value.tuple_value.name}_{value.index}"
            return
        yield expr.name
        if value is None or not is_op(value, "reshape"):
            return
        expr = value.args[0]


def _result_tensors(var: relax.Var, outputs: set[str]) -> list[Tensor]:
    def tensor(name: str, like: relax.Expr) -> Tensor:
        role = Role.OUTPUT if name in outputs else Role.ACTIVATION
        dtype = like.dtype
        shape = tuple(int(extent) for extent in like.shape.values)
        return Tensor(name, shape, str(getattr(dtype, "dtype", dtype)), role)

    if isinstance(var.ty, relax.TupleType):
        return [tensor(f"{var.name}_{i}", field) for i, field in enumerate(var.ty.fields)]
    return [tensor(var.name, var.ty)]


def _kernel(
    name: str, inputs: tuple[str, ...], results: list[Tensor], origins: tuple[str, ...], facts: Kernel
) -> Kernel:
    """The kernel of one call, from the facts of its function (whose tensors are named by position)."""
    outputs = tuple(t.name for t in results)
    overwrite = tuple(
        (outputs[int(o)], inputs[int(i)]) for o, i in facts.may_overwrite if inputs.count(inputs[int(i)]) == 1
    )
    return Kernel(
        name=name,
        function=facts.function,
        inputs=inputs,
        outputs=outputs,
        may_overwrite=overwrite,
        flops=facts.flops,
        bytes_moved=facts.bytes_moved,
        gpu_workspace_bytes=facts.gpu_workspace_bytes,
        cpu_workspace_bytes=facts.cpu_workspace_bytes,
        devices=facts.devices,
        origins=origins,
        family=facts.family,
        precision=facts.precision,
        precision_note=facts.precision_note,
        choice=tuple(inputs[int(position)] for position in facts.choice),
        appends=facts.appends,
        is_mean_of_ranks=facts.is_mean_of_ranks,
        checks=tuple(
            replace(
                check,
                node=origins[int(check.node)],
                tensor=inputs[int(check.tensor)] if check.tensor else "",
            )
            for check in facts.checks
        ),
    )


def _each_once(kernel: Kernel, tensors: Mapping[str, Tensor]) -> Kernel:
    """The kernel with the bytes of an input that it has several times, by views, counted once."""
    again = sum(tensors[name].size_bytes for i, name in enumerate(kernel.inputs) if name in kernel.inputs[:i])
    written = sum(tensors[name].size_bytes for name in kernel.outputs)
    return replace(kernel, bytes_moved=max(kernel.bytes_moved - again, written)) if again else kernel


def _states_first(kernel: Kernel, tensors: Mapping[str, Tensor]) -> Kernel:
    """The kernel with pairs of a model's output and input first: new states overwrite old ones."""

    def is_other(pair: tuple[str, str]) -> bool:
        return [tensors[name].role for name in pair] != [Role.OUTPUT, Role.INPUT]

    return replace(kernel, may_overwrite=tuple(sorted(kernel.may_overwrite, key=is_other)))


def _facts(name: str, function: tirx.PrimFunc, scheduled: Mapping[tuple[str, Device], Scheduled]) -> Kernel:
    """What all calls of a function have in common."""
    workspace = {
        device: sum(align(size) for size in scheduled[name, device].workspace_bytes)
        for device in Device
        if (name, device) in scheduled
    }
    attributes, checked = function.attrs or {}, checked_inputs(function)
    return Kernel(
        name=name,
        function=name,
        inputs=(),
        outputs=(),
        may_overwrite=_overwritable(function),
        flops=_flops(function),
        bytes_moved=bytes_moved(function),
        gpu_workspace_bytes=workspace.get(Device.GPU, 0),
        cpu_workspace_bytes=workspace.get(Device.CPU, 0),
        devices=tuple(workspace),
        family=_family(name, scheduled),
        precision=str(attributes.get(PRECISION, "fp32")),
        precision_note=str(attributes.get(PRECISION_NOTE, "")),
        choice=tuple(map(str, choice_of(function))),
        appends=is_appended_rows(function),
        is_mean_of_ranks=has_means_of_ranks(function),
        checks=tuple(
            # node and tensor by their positions among a kernel's origins and inputs
            Check(
                str(node),
                str(operator),
                CheckKind(str(kind)),
                int(lower),
                int(upper),
                str(checked.get(number, "")),
            )
            for number, (node, operator, kind, lower, upper) in enumerate(attributes.get(CHECKS, ()))
        ),
    )


def _family(name: str, scheduled: Mapping[tuple[str, Device], Scheduled]) -> str:
    """As the CPU's rule declares, since the CPU's rules distinguish more families than the GPU's."""
    made = scheduled.get((name, Device.CPU)) or scheduled.get((name, Device.GPU))
    return OTHER_FAMILY if made is None else made.family


def _flops(function: tirx.PrimFunc) -> int:
    """Of a cache only those of the rows that are replaced."""
    flops = int(s_tir.analysis.estimate_tir_flops(tvm.IRModule({"main": function})))
    if not is_appended_rows(function):
        return flops
    past, new, *_ = function.params
    return flops * int(new.shape[2]) // int(past.shape[2])


def bytes_moved(function: tirx.PrimFunc) -> int:
    """Bytes of all parameters once.

    Without a reduction about one element of each input is read for one of the outputs, so of a larger input
    (a table to gather from) only as many elements count. Of a cache only the rows that are replaced do.
    """
    sizes = [math.prod(int(extent) for extent in p.shape) for p in function.params]
    if is_appended_rows(function):
        _, new, before, _ = sizes
        sizes = [0, new, before, new]
    limit = _most_read(function, sizes)
    return sum(
        int(min(size, limit)) * dtype_bits(str(p.dtype)) // 8
        for size, p in zip(sizes, function.params, strict=True)
    )


def _most_read(function: tirx.PrimFunc, sizes: Sequence[int]) -> float:
    """Elements of all outputs; infinite if there is a reduction, or if no output is written by a block."""
    blocks: list[s_tir.SBlock] = []
    structural_walk(function.body, (s_tir.SBlock, blocks.append))
    if any(v.iter_type == tirx.IterVar.CommReduce for block in blocks for v in block.iter_vars):
        return math.inf
    written = [write.source for block in blocks for write in block.writes]
    found = [n for n, p in zip(sizes, function.params, strict=True) if any(p.same_as(w) for w in written)]
    return sum(found) if found else math.inf


def _overwritable(function: tirx.PrimFunc) -> tuple[tuple[str, str], ...]:
    """Pairs (output, input), by position, where the output may take the input's bytes.

    True if all blocks that read the input write an output and read exactly the element that they write, none
    is a reduction, and the last of them writes this output. (Another block might be computed inside of one
    that comes later.)
    """
    schedule = s_tir.Schedule(function)
    blocks = [schedule.get(block) for block in schedule.get_child_blocks(schedule.get_sblock("root"))]
    parameters = list(function.params)
    written = [p for p in parameters if any(w.source.same_as(p) for b in blocks for w in b.writes)]
    inputs = [p for p in parameters if not any(p.same_as(w) for w in written)]
    return tuple(
        (str(o), str(i))
        for o, output in enumerate(written)
        for i, source in enumerate(inputs)
        if _same_element(output, source, blocks, written)
    )


def _same_element(output: tirx.Var, source: tirx.Var, blocks: list, written: list[tirx.Var]) -> bool:
    readers = [block for block in blocks if any(r.source.same_as(source) for r in block.reads)]
    writers = [block for block in blocks if any(w.source.same_as(output) for w in block.writes)]
    if not readers or len(writers) != 1 or not readers[-1].same_as(writers[0]):
        return False
    same_type = str(source.dtype) == str(output.dtype) and structural_equal(source.shape, output.shape)
    to_outputs = all(any(w.source.same_as(p) for p in written) for block in readers for w in block.writes)
    return same_type and to_outputs and all(_is_elementwise(block, source) for block in readers)


def _is_elementwise(block: s_tir.SBlock, source: tirx.Var) -> bool:
    """Whether a block reads only that element of a tensor which it writes of its result."""
    reads = [r.region for r in block.reads if r.source.same_as(source)]
    writes = [w.region for w in block.writes]
    return (
        len(reads) == len(writes) == 1
        and structural_equal(reads[0], writes[0])
        and all(int(r.extent) == 1 for r in reads[0])
        and all(int(v.iter_type) == int(tirx.IterVar.DataPar) for v in block.iter_vars)
    )
