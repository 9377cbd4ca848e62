"""No kernel of the networks we care about is left to the fallback."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import relax

op = relax.op


def conv(stride=1, padding=0, dilation=1, groups=1, epilogue="bias relu"):
    def build(e, x, w, b, *residual):
        operator = op.nn.conv1d if len(x.ty.shape) == 3 else op.nn.conv2d
        y = e(op.add(e(operator(x, w, strides=stride, padding=padding, dilation=dilation, groups=groups)), b))
        for r in residual:
            y = e(op.add(y, r))
        if "relu6" in epilogue:
            return e(op.clip(y, 0.0, 6.0))
        return e(op.nn.relu(y)) if "relu" in epilogue else y

    return build


def dense(epilogue):
    def build(e, x, w, b):
        y = e(op.add(e(op.matmul(x, w)), b))
        return e(epilogue(y)) if epilogue else y

    return build


REPRESENTATIVES: dict[str, tuple[Any, ...]] = {
    "squeezenet: expand": (conv(), [(1, 16, 55, 55), (64, 16, 1, 1), (1, 64, 1, 1)], "conv2d"),
    "squeezenet: fire concat": (
        lambda e, x, y: e(op.concat([x, y], 1)),
        [(1, 64, 55, 55)] * 2,
        "elementwise",
    ),
    "squeezenet: pool": (
        lambda e, x: e(op.nn.max_pool2d(x, (3, 3), (2, 2))),
        [(1, 64, 111, 111)],
        "pooling",
    ),
    "resnet50: stem": (conv(2, 3), [(1, 3, 224, 224), (64, 3, 7, 7), (1, 64, 1, 1)], "conv2d_converted"),
    "resnet50: residual": (
        conv(),
        [(1, 512, 7, 7), (2048, 512, 1, 1), (1, 2048, 1, 1), (1, 2048, 7, 7)],
        "conv2d_converted",
    ),
    "resnet50: downsampling": (
        conv(2, 0),
        [(1, 256, 56, 56), (512, 256, 1, 1), (1, 512, 1, 1)],
        "conv2d_converted",
    ),
    "resnet50: head": (dense(None), [(1, 2048), (2048, 1000), (1000,)], "matmul"),
    "resnet50: pool": (lambda e, x: e(op.mean(x, [2, 3], True)), [(1, 2048, 7, 7)], "reduction"),
    "inception_v1: 5x5": (conv(1, 2), [(1, 16, 28, 28), (32, 16, 5, 5), (1, 32, 1, 1)], "conv2d_converted"),
    "inception_v1: pool": (
        lambda e, x: e(op.nn.max_pool2d(x, (3, 3), (1, 1), (1, 1))),
        [(1, 192, 28, 28)],
        "pooling",
    ),
    "densenet121: growth": (
        conv(1, 1),
        [(1, 128, 56, 56), (32, 128, 3, 3), (1, 32, 1, 1)],
        "winograd_converted",
    ),
    "densenet121: scale": (
        lambda e, x, a, b: e(op.nn.relu(e(op.add(e(op.multiply(x, a)), b)))),
        [(1, 96, 56, 56), (1, 96, 1, 1), (1, 96, 1, 1)],
        "elementwise",
    ),
    "densenet121: transition": (
        lambda e, x: e(op.nn.avg_pool2d(x, (2, 2), (2, 2))),
        [(1, 128, 56, 56)],
        "pooling",
    ),
    "unet: up": (
        lambda e, x, w: e(op.nn.conv2d_transpose(x, w, strides=(2, 2))),
        [(1, 64, 16, 16), (64, 32, 2, 2)],
        "conv2d",
    ),
    "unet: classes": (conv(epilogue="bias"), [(1, 64, 64, 64), (2, 64, 1, 1), (1, 2, 1, 1)], "conv2d"),
    "bert: projection": (dense(None), [(1, 128, 768), (768, 768), (768,)], "matmul"),
    "bert: gelu": (dense(op.nn.gelu), [(1, 128, 768), (768, 3072), (3072,)], "matmul"),
    "bert: attention": (lambda e, q, k: e(op.matmul(q, k)), [(1, 12, 128, 64), (1, 12, 64, 128)], "matmul"),
    "bert: softmax": (lambda e, x: e(op.nn.softmax(x)), [(1, 12, 128, 128)], "softmax"),
    "bert: layer norm": (
        lambda e, *a: e(op.nn.layer_norm(*a, axes=[-1])),
        [(1, 128, 768), (768,), (768,)],
        "reduction",
    ),
    "bert: heads": (lambda e, x: e(op.permute_dims(x, [0, 2, 1, 3])), [(1, 128, 12, 64)], "elementwise"),
    "mlp: hidden": (dense(op.nn.relu), [(1, 784), (784, 512), (512,)], "matmul"),
    "lenet: first": (conv(1, 2), [(1, 1, 28, 28), (6, 1, 5, 5), (1, 6, 1, 1)], "conv2d"),
    "lenet: pool": (lambda e, x: e(op.nn.max_pool2d(x, (2, 2), (2, 2))), [(1, 6, 28, 28)], "pooling"),
    "mobilenet_v2: depthwise": (
        conv(2, 1, groups=96, epilogue="relu6"),
        [(1, 96, 112, 112), (96, 1, 3, 3), (1, 96, 1, 1)],
        "depthwise_converted",
    ),
    "vgg: 3x3": (conv(1, 1), [(1, 64, 224, 224), (64, 64, 3, 3), (1, 64, 1, 1)], "winograd_converted"),
    "atacworks: dilated": (conv(1, 200, 8), [(1, 15, 6000), (15, 15, 51), (1, 15, 1)], "fft_conv1d"),
    "super_resolution: shuffle": (
        lambda e, x: e(op.permute_dims(x, [0, 1, 4, 2, 5, 3])),
        [(1, 1, 3, 3, 56, 56)],
        "elementwise",
    ),
}


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_kernel_of_a_known_network_has_a_rule_of_its_own(avx2, name):
    build, shapes, rule = REPRESENTATIVES[name]
    assert avx2.schedule(avx2.function(build, shapes), range(1, len(shapes))).rule == rule


def test_request_keeps_its_function_name(avx2):
    function = avx2.function(*REPRESENTATIVES["mlp: hidden"][:2]).with_attr("global_symbol", "hidden")
    for constants in ([], [1]):
        assert avx2.schedule(function, constants).function.attrs["global_symbol"] == "hidden"
    softmax = avx2.function(*REPRESENTATIVES["bert: softmax"][:2]).with_attr("global_symbol", "soft")
    assert avx2.schedule(softmax).function.attrs["global_symbol"] == "soft"
