"""Softmax and cross entropy in one, without the softmax in memory."""

from __future__ import annotations

from tvm import relax, te, tirx

from hybridc.passes.program.program import tensor_shape
from hybridc.passes.training.gradients import placeholder


def cross_entropy(logits: relax.Expr, targets: relax.Expr, smoothing: float) -> tirx.PrimFunc:
    """Logits [N, C, ...], targets [N, ...]: the loss of each, and `log(sum(exp(logits)))`, both [N, ...].

    The largest logit is subtracted before the exponential. Targets are classes; what is not one is refused
    when it is fed, and reads the nearest class's logit here.
    """
    classes = tensor_shape(logits)[1]
    x, t = placeholder(logits, "logits"), placeholder(targets, "targets")
    c, k, j = (te.reduce_axis((0, tirx.IntImm("int64", classes)), name) for name in "ckj")
    largest = te.compute(t.shape, lambda n, *at: te.max(x[(n, c, *at)], axis=c), name="largest")
    total = te.compute(
        t.shape, lambda n, *at: te.sum(tirx.exp(x[(n, k, *at)] - largest[(n, *at)]), axis=k), name="total"
    )
    lse = te.compute(t.shape, lambda *at: tirx.log(total[at]) + largest[at], name="log_sum_exp")
    if smoothing:
        sums = te.compute(t.shape, lambda n, *at: te.sum(x[(n, j, *at)], axis=j), name="sums")

    def loss(n: tirx.Var, *at: tirx.Var) -> tirx.Expr:
        chosen = x[(n, tirx.max(0, tirx.min(t[(n, *at)].astype("int64"), classes - 1)), *at)]
        if not smoothing:
            return lse[(n, *at)] - chosen
        keep, spread = (tirx.const(v, x.dtype) for v in (1 - smoothing, smoothing / classes))
        return lse[(n, *at)] - keep * chosen - spread * sums[(n, *at)]

    losses = te.compute(t.shape, loss, name="loss")
    return te.create_prim_func([x, t, losses, lse]).with_attr(
        "label_smoothing", tirx.const(smoothing, "float64")
    )


def cross_entropy_gradient(
    logits: relax.Expr, targets: relax.Expr, smoothing: float, lse: relax.Expr, dy: relax.Expr
) -> tirx.PrimFunc:
    """`(softmax(logits) - target's distribution) * dy`, with dy [N, ...], like the logits."""
    classes = tensor_shape(logits)[1]
    x, t, log_sum, grad = (
        placeholder(e, name)
        for e, name in ((logits, "logits"), (targets, "targets"), (lse, "log_sum_exp"), (dy, "dy"))
    )

    def body(n: tirx.Var, c: tirx.Var, *at: tirx.Var) -> tirx.Expr:
        off, on = (tirx.const(v, x.dtype) for v in (smoothing / classes, 1 - smoothing + smoothing / classes))
        wanted = tirx.Select(t[(n, *at)].astype("int64") == c, on, off)
        return (tirx.exp(x[(n, c, *at)] - log_sum[(n, *at)]) - wanted) * grad[(n, *at)]

    out = te.compute(x.shape, body, name="softmax_cross_entropy_gradient")
    return te.create_prim_func([x, t, log_sum, grad, out])
