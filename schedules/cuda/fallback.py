"""Whatever no other rule takes: right for every function that makes no call to the host."""

from __future__ import annotations

from tvm import s_tir, tirx

from hybridc.recurrence.tensors import recurrence_of
from hybridc.schedules.cuda.core.launch import BLOCK_THREADS, cuda_target, finish, finish_function
from hybridc.schedules.cuda.core.loops import inline_all, launch_alone, launched
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="other")
def fallback(request: Request) -> Scheduled | None:
    """Accepts all but recurrences: a launch for each block, with results between launches in the workspace.

    A body that is not made of blocks (scatter) gets a launch for each of its loops instead: a thread
    for each iteration of a loop that is marked parallel, one thread for any other.
    """
    # one thread would make all steps; the CPU is faster, whatever has to be copied
    if recurrence_of(request.function.body) is not None:
        return None
    target = cuda_target(request.target)
    schedule = s_tir.Schedule(request.function)
    blocks = inline_all(schedule)
    if blocks:
        for info in blocks:
            launch_alone(schedule, info)
        return finish(schedule, "fallback", target)
    if not isinstance(request.function.body, s_tir.SBlockRealize):
        return None
    return finish_function(_launch_loops(request.function), "fallback", target)


def _launch_loops(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function whose body is plain statements, each of them a launch."""
    block = function.body.block
    launches = [_launch(statement) for statement in _statements(block.body)]
    body = launches[0] if len(launches) == 1 else tirx.SeqStmt(launches)
    root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=block.alloc_buffers)
    realize = s_tir.SBlockRealize([], True, root)
    return tirx.PrimFunc(function.params, realize, function.ret_type, function.attrs, function.span)


def _statements(body: tirx.Stmt) -> list[tirx.Stmt]:
    """The loops of a sequence; the sequence as one if anything in it is not a loop."""
    while isinstance(body, tirx.AttrStmt) and body.attr_key == "pragma_scope":
        body = body.body
    if isinstance(body, tirx.SeqStmt) and all(isinstance(s, tirx.For) for s in body):
        return list(body)
    return [body]


def _launch(statement: tirx.Stmt) -> tirx.Stmt:
    """Iterations of a parallel loop over threads, in blocks of `BLOCK_THREADS`; else one thread."""
    if isinstance(statement, tirx.For) and statement.kind == tirx.ForKind.PARALLEL:
        iterations, threads = int(statement.extent), BLOCK_THREADS
    else:
        iterations, threads = 1, 1

    def body(block: tirx.Var, thread: tirx.Var) -> tirx.Stmt:
        if threads == 1:
            return statement
        position = block * threads + thread
        at = statement.min + position.astype(str(statement.loop_var.ty.dtype))
        one = tirx.For(statement.loop_var, at, 1, tirx.ForKind.SERIAL, statement.body)
        return tirx.IfThenElse(position < iterations, one, None)

    return launched(-(-iterations // threads), threads, body)
