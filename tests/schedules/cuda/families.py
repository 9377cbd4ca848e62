"""Small functions of every family the compiler makes, as fusion leaves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from tests.schedules.cuda import references as ref
from tests.support.fusion import fused_operators

Emit = Callable[[relax.Expr], relax.Var]
Array = np.ndarray


@dataclass(frozen=True)
class Family:
    """A function as Relax operators, what it means, and what its schedule should be."""

    build: Callable[..., relax.Expr]
    """Called with `emit` and the inputs."""
    reference: Callable[..., Array | list[Array]]
    shapes: tuple[tuple[int, ...], ...]
    rule: str
    dtypes: tuple[str, ...] = ()
    launches: int = 1
    workspace_bytes: tuple[int, ...] = ()

    def function(self, name: str) -> tirx.PrimFunc:
        """The fused function."""
        function = fused_operators(self.build, self.shapes, self.input_dtypes)
        return function.with_attr("global_symbol", name)

    @property
    def input_dtypes(self) -> tuple[str, ...]:
        return self.dtypes or ("float32",) * len(self.shapes)

    def draw(self) -> list[Array]:
        """Seeded inputs; integers are indices into at least two rows."""
        generator = np.random.default_rng(0)
        return [
            generator.integers(0, 2, shape).astype(dtype)
            if "int" in dtype
            else generator.standard_normal(shape).astype(dtype)
            for shape, dtype in zip(self.shapes, self.input_dtypes, strict=True)
        ]


def convolution(
    shape: tuple[int, ...], weight: tuple[int, ...], residual: bool = False, **settings: int
) -> Family:
    """Convolution, bias, an optional residual and ReLU."""
    conv = {3: op.nn.conv1d, 4: op.nn.conv2d, 5: op.nn.conv3d}[len(shape)]
    relax_settings = {"stride": "strides"}
    bias = (1, weight[0], *(1,) * (len(shape) - 2))

    def build(emit: Emit, x: relax.Var, w: relax.Var, b: relax.Var, *rest: relax.Var) -> relax.Expr:
        y = emit(conv(x, w, **{relax_settings.get(key, key): value for key, value in settings.items()}))
        y = emit(op.add(y, b))
        return op.nn.relu(emit(op.add(y, rest[0])) if rest else y)

    def reference(x: Array, w: Array, b: Array, *rest: Array) -> Array:
        return ref.relu(ref.conv(x, w, **settings) + b + (rest[0] if rest else 0))

    out = ref.conv(np.zeros(shape), np.zeros(weight), **settings).shape
    return Family(build, reference, (shape, weight, bias, *((out,) if residual else ())), "conv2d")


def unary(
    build: Callable[[relax.Var], relax.Expr],
    reference: Callable[[Array], Array | list[Array]],
    *shape: int,
    rule: str,
) -> Family:
    return Family(lambda emit, x: build(x), reference, (shape,), rule)


def gelu_of_product(emit: Emit, x: relax.Var, w: relax.Var, b: relax.Var) -> relax.Expr:
    return op.nn.gelu(emit(op.add(emit(op.matmul(x, w)), b)))


FAMILIES: dict[str, Family] = {
    "conv": convolution((1, 5, 9, 9), (7, 5, 3, 3), padding=1),
    "conv_strided": convolution((2, 5, 9, 9), (7, 5, 3, 3), padding=1, stride=2),
    "conv_pointwise": convolution((1, 16, 6, 6), (20, 16, 1, 1)),
    "conv_stem": replace(
        convolution((1, 3, 18, 18), (8, 3, 7, 7), padding=3, stride=2), launches=2, workspace_bytes=(16128,)
    ),
    "conv_dilated": convolution((1, 5, 9, 9), (7, 5, 3, 3), padding=2, dilation=2),
    "conv_residual": convolution((1, 7, 9, 9), (7, 7, 3, 3), residual=True, padding=1),
    "conv_grouped": convolution((1, 8, 9, 9), (6, 4, 3, 3), padding=1, groups=2),
    "conv_depthwise": convolution((1, 8, 9, 9), (8, 1, 3, 3), padding=1, groups=8),
    "conv_one_channel": convolution((1, 6, 5, 5), (1, 6, 1, 1)),
    "conv_grouped_odd": convolution((3, 6, 10, 10), (120, 2, 3, 3), residual=True, stride=2, groups=3),
    "conv_of_one_step": replace(
        convolution((1, 1, 5, 5), (3, 1, 1, 1)),
        rule="elementwise",
        launches=4,
        workspace_bytes=(100, 300, 300),
    ),
    "conv_1d": convolution((1, 5, 100), (6, 5, 9), padding=32, dilation=8),
    "conv_3d": convolution((1, 3, 5, 5, 5), (4, 3, 3, 3, 3), padding=1),
    "conv_transposed": Family(
        lambda emit, x, w: op.nn.conv2d_transpose(x, w, strides=(2, 2), padding=(1, 1)),
        lambda x, w: ref.conv_transpose(x, w, stride=2, padding=1),
        ((1, 5, 7, 7), (5, 6, 4, 4)),
        "conv2d",
    ),
    "matmul_gelu": Family(
        gelu_of_product, lambda x, w, b: ref.gelu(x @ w + b), ((33, 40), (40, 50), (50,)), "matmul"
    ),
    "matmul_wide": Family(
        lambda emit, x, w: op.matmul(x, w), lambda x, w: x @ w, ((5, 17), (17, 131)), "matmul"
    ),
    "matmul_vector": Family(
        gelu_of_product, lambda x, w, b: ref.gelu(x @ w + b), ((1, 300), (300, 50), (50,)), "matmul"
    ),
    "matmul_one_column": Family(  # of which dlight's GEMV makes a loop whose extent it cannot read
        lambda emit, q, k, m: op.add(emit(op.matmul(q, k)), m),
        lambda q, k, m: q @ k + m,
        ((1, 2, 10, 16), (1, 2, 16, 1), (1, 1, 10, 1)),
        "matmul",
    ),
    "matmul_batched": Family(
        lambda emit, q, k: op.matmul(q, k), lambda q, k: q @ k, ((2, 3, 17, 8), (2, 3, 8, 19)), "matmul"
    ),
    "max_pool": unary(
        lambda x: op.nn.max_pool2d(x, (3, 3), strides=2, padding=1),
        lambda x: ref.max_pool(x, 3, 2, 1),
        *(1, 4, 9, 9),
        rule="reduction",
    ),
    "average_pool": unary(
        lambda x: op.nn.avg_pool2d(x, (3, 3), strides=2, padding=1, count_include_pad=False),
        lambda x: ref.average_pool(x, 3, 2, 1),
        *(1, 4, 9, 9),
        rule="reduction",
    ),
    "global_pool": unary(
        lambda x: op.mean(x, [2, 3], True),
        lambda x: x.mean((2, 3), keepdims=True),
        1,
        40,
        7,
        7,
        rule="rows",
    ),
    "softmax": unary(lambda x: op.nn.softmax(x, -1), lambda x: ref.softmax(x, -1), 3, 5, 37, rule="rows"),
    "softmax_short": unary(
        lambda x: op.nn.softmax(x, -1), lambda x: ref.softmax(x, -1), 70, 10, rule="reduction"
    ),
    "softmax_channels": unary(
        lambda x: op.nn.softmax(x, 1), lambda x: ref.softmax(x, 1), 2, 5, 37, rule="reduction"
    ),
    "log_softmax": unary(
        lambda x: op.nn.log_softmax(x, -1), lambda x: np.log(ref.softmax(x, -1)), 5, 37, rule="rows"
    ),
    "layer_norm": Family(
        lambda emit, x, g, b: op.nn.layer_norm(x, g, b, axes=[-1]),
        lambda x, g, b: ref.normalise(x, (-1,), g, b),
        ((2, 9, 64), (64,), (64,)),
        "rows",
    ),
    "instance_norm": Family(
        lambda emit, x, g, b: op.nn.instance_norm(x, g, b, 1, [2, 3]),
        lambda x, g, b: ref.normalise(x, (2, 3), g[:, None, None], b[:, None, None]),
        ((1, 4, 6, 6), (4,), (4,)),
        "reduction",
    ),
    "mean_rows": unary(lambda x: op.mean(x, [1]), lambda x: x.mean(1), 9, 64, 5, rule="reduction"),
    "sum_all": unary(lambda x: op.sum(x), lambda x: x.sum(), 9, 64, rule="rows"),
    "mean_all": unary(lambda x: op.mean(x), lambda x: x.mean(), 9, 64, rule="rows"),
    "mean_of_many": replace(
        unary(lambda x: op.mean(x), lambda x: x.mean(), 150, 512, rule="long_reductions"),
        launches=2,
        workspace_bytes=(4,),
    ),
    "max_all": unary(lambda x: op.max(x), lambda x: x.max(), 9, 64, rule="rows"),
    "max_rows": unary(lambda x: op.max(x, [1]), lambda x: x.max(1), 9, 64, rule="rows"),
    "argmax": unary(lambda x: op.argmax(x, 1), lambda x: x.argmax(1), 9, 64, rule="reduction"),
    "concat": Family(
        lambda emit, x, y: op.concat([x, y], 1),
        lambda x, y: np.concatenate([x, y], 1),
        ((1, 3, 5), (1, 4, 5)),
        "elementwise",
    ),
    "split": Family(
        lambda emit, x: op.split(x, 2, 1),
        lambda x: np.split(x, 2, 1),
        ((1, 6, 5),),
        "elementwise",
        launches=2,
    ),
    "slice": unary(
        lambda x: op.strided_slice(x, [1], [1], [5], [2]), lambda x: x[:, 1:5:2], 1, 6, 5, rule="elementwise"
    ),
    "take": Family(
        lambda emit, x, i: op.take(x, i, 0),
        lambda x, i: x[i.astype(int)],
        ((10, 8), (2, 3)),
        "vector_elementwise",
        ("float32", "int64"),
    ),
    "resize": unary(
        lambda x: op.image.resize2d(x, (9, 11), layout="NCHW", method="linear"),
        lambda x: ref.resize_linear(x, 9, 11),
        *(1, 3, 5, 5),
        rule="elementwise",
    ),
    "transpose": unary(
        lambda x: op.permute_dims(x, [2, 0, 1]), lambda x: x.transpose(2, 0, 1), 3, 5, 7, rule="elementwise"
    ),
    "power": Family(
        lambda emit, x, y: op.power(x, emit(op.round(y))),
        lambda x, y: np.power(x, np.rint(y)),
        ((3, 64), (3, 64)),
        "vector_elementwise",
    ),
    "waves": unary(
        lambda x: op.sin(op.multiply(x, relax.const(1024.0))),
        lambda x: np.sin(x * 1024),
        3,
        64,
        rule="vector_elementwise",
    ),
    "scatter": Family(
        lambda emit, x, i, u: op.scatter_elements(x, i, u, 0),
        ref.scatter_rows,
        ((300, 3), (1, 3), (1, 3)),
        "fallback",
        ("float32", "int64", "float32"),
        launches=2,
    ),
}
