"""Graphs with the shapes of real networks, as plain data: what the planner's quality is measured on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from hybridc.ir import Graph, Kernel, Role, Tensor

FLOAT_BYTES = 4


class NetworkBuilder:
    """Builds a graph kernel by kernel; tensors go by their names."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.kernels: list[Kernel] = []
        self.outputs: list[str] = []

    def size(self, name: str) -> int:
        return self.tensors[name].size_bytes

    def tensor(self, size_bytes: float, role: Role) -> str:
        name = f"{role.value}{len(self.tensors)}"
        self.tensors[name] = Tensor(name, (int(size_bytes),), "uint8", role)
        return name

    def input(self, size_bytes: float) -> str:
        return self.tensor(size_bytes, Role.INPUT)

    def weight(self, size_bytes: float) -> str:
        return self.tensor(size_bytes, Role.WEIGHT)

    def kernel(
        self,
        inputs: Sequence[str],
        size_bytes: float,
        flops: float,
        *,
        workspace_bytes: int = 0,
        bytes_moved: float | None = None,
        output: bool = False,
    ) -> str:
        """Append a kernel with one result of `size_bytes`; returns that."""
        result = self.tensor(size_bytes, Role.OUTPUT if output else Role.ACTIVATION)
        if output:
            self.outputs.append(result)
        touched = sum(map(self.size, (*inputs, result))) if bytes_moved is None else bytes_moved
        self.kernels.append(
            Kernel(
                name=f"k{len(self.kernels)}",
                function="f",
                inputs=tuple(inputs),
                outputs=(result,),
                flops=int(flops),
                bytes_moved=int(touched),
                gpu_workspace_bytes=workspace_bytes,
            )
        )
        return result

    def elementwise(self, *inputs: str, flops_each: float = 1) -> str:
        size = self.size(inputs[0])
        return self.kernel(inputs, size, flops_each * size / FLOAT_BYTES)

    def graph(self) -> Graph:
        outputs = self.outputs or [self.kernels[-1].outputs[0]]
        inputs = tuple(t.name for t in self.tensors.values() if t.role is Role.INPUT)
        return Graph(tuple(self.kernels), tuple(self.tensors.values()), inputs, tuple(outputs))


def bert(layers: int = 12, tokens: int = 128, width: int = 768) -> Graph:
    """An encoder in the manner of BERT: its bytes are weights. 14 kernels a layer."""
    build = NetworkBuilder()
    size = tokens * width * FLOAT_BYTES
    scores = 12 * tokens * tokens * FLOAT_BYTES

    def linear(x: str, columns: int, rows: int) -> str:
        weight = build.weight((columns * rows + rows) * FLOAT_BYTES)
        return build.kernel((x, weight), tokens * rows * FLOAT_BYTES, 2 * tokens * columns * rows)

    def normalised(x: str) -> str:
        return build.kernel((x, build.weight(2 * width * FLOAT_BYTES)), size, 8 * size)

    table = build.weight(30522 * width * FLOAT_BYTES)
    x = build.kernel((build.input(tokens * 8), table), size, 0, bytes_moved=3 * size)
    x = build.kernel((x, build.weight(512 * width * FLOAT_BYTES)), size, size, bytes_moved=3 * size)
    for _ in range(layers):
        query, key, value = (linear(x, width, width) for _ in range(3))
        weights = build.kernel((query, key), scores, 2 * tokens * tokens * width)
        weights = build.kernel((weights,), scores, 60 * tokens * tokens)
        context = build.kernel((weights, value), size, 2 * tokens * tokens * width)
        x = normalised(build.elementwise(linear(context, width, width), x))
        hidden = build.elementwise(linear(x, width, 4 * width), flops_each=10)
        x = normalised(build.elementwise(linear(hidden, 4 * width, width), x))
    linear(x, width, width)
    return build.graph()


def unet(edge: int = 512) -> Graph:
    """U-Net: its bytes are activations, and some of its skip connections span almost the whole run."""
    build = NetworkBuilder()

    def conv(x: str, channels: int, filters: int, edge: int, kernel: int = 3) -> str:
        weight = build.weight((channels * filters * kernel**2 + filters) * FLOAT_BYTES)
        size = edge**2 * filters * FLOAT_BYTES
        return build.kernel((x, weight), size, 2 * edge**2 * channels * filters * kernel**2)

    def two_convs(x: str, channels: int, filters: int, edge: int) -> str:
        x = build.elementwise(conv(x, channels, filters, edge))
        return build.elementwise(conv(x, filters, filters, edge))

    x, channels, skips = build.input(3 * edge**2 * FLOAT_BYTES), 3, []
    for filters in (64, 128, 256, 512):
        x = two_convs(x, channels, filters, edge)
        skips.append(x)
        x = build.kernel((x,), edge**2 * filters, edge**2 * filters)
        edge, channels = edge // 2, filters
    x, channels = two_convs(x, 512, 1024, edge), 1024
    for filters in (512, 256, 128, 64):
        edge *= 2
        size = edge**2 * filters * FLOAT_BYTES
        weight = build.weight(channels * filters * 4 * FLOAT_BYTES)
        x = build.kernel((x, weight), size, 2 * edge**2 * channels * filters)
        x = build.kernel((skips.pop(), x), 2 * size, 0)
        x, channels = two_convs(x, 2 * filters, filters, edge), filters
    conv(x, 64, 2, edge, 1)
    return build.graph()


_Backward = Callable[[dict[str, str]], None]


class _ResNet:
    """A residual network, and with `training` also its backward pass."""

    def __init__(self, batch: int, training: bool) -> None:
        self.build = NetworkBuilder()
        self.batch = batch
        self.training = training
        self.backward: list[_Backward] = []

    def add_gradient(self, gradients: dict[str, str], tensor: str, gradient: str) -> None:
        if tensor in gradients:
            gradient = self.build.elementwise(gradients[tensor], gradient)
        gradients[tensor] = gradient

    def conv(
        self,
        x: str,
        channels: int,
        filters: int,
        edge: int,
        kernel: int,
        stride: int = 1,
        *,
        first: bool = False,
    ) -> str:
        build, edge = self.build, edge // stride
        size = self.batch * edge**2 * filters * FLOAT_BYTES
        flops = 2 * self.batch * edge**2 * channels * filters * kernel**2
        weight = build.weight(channels * filters * kernel**2 * FLOAT_BYTES)
        workspace = min(size, 16 << 20) if kernel == 3 else 0
        y = build.kernel((x, weight), size, flops, workspace_bytes=workspace)
        self.backward.append(self._conv_backward(x, y, weight, flops, first))
        return y

    def _conv_backward(self, x: str, y: str, weight: str, flops: int, first: bool) -> _Backward:
        def backward(gradients: dict[str, str]) -> None:
            build, gradient, workspace = self.build, gradients.pop(y), 16 << 20
            build.kernel((x, gradient), build.size(weight), flops, workspace_bytes=workspace, output=True)
            if not first:
                back = build.kernel((gradient, weight), build.size(x), flops, workspace_bytes=workspace)
                self.add_gradient(gradients, x, back)

        return backward

    def unary(self, x: str, *, flops_each: float = 1, keeps_input: bool = False) -> str:
        """An elementwise kernel whose gradient reads its input or its output."""
        y = self.build.elementwise(x, flops_each=flops_each)

        def backward(gradients: dict[str, str]) -> None:
            back = self.build.elementwise(x if keeps_input else y, gradients.pop(y), flops_each=flops_each)
            self.add_gradient(gradients, x, back)

        self.backward.append(backward)
        return y

    def normalised(self, x: str) -> str:
        return self.unary(x, flops_each=8, keeps_input=True) if self.training else x

    def relu(self, x: str) -> str:
        return self.unary(x) if self.training else x

    def add(self, a: str, b: str) -> str:
        y = self.build.elementwise(a, b)

        def backward(gradients: dict[str, str]) -> None:
            gradient = gradients.pop(y)
            self.add_gradient(gradients, a, gradient)
            self.add_gradient(gradients, b, gradient)

        self.backward.append(backward)
        return y

    def pool(self, x: str, size: int, flops: int) -> str:
        y = self.build.kernel((x,), size, flops)

        def backward(gradients: dict[str, str]) -> None:
            back = self.build.kernel((gradients.pop(y), x), self.build.size(x), self.build.size(x) / 4)
            self.add_gradient(gradients, x, back)

        self.backward.append(backward)
        return y

    def block(self, x: str, channels: int, width: int, edge: int, stride: int, project: bool) -> str:
        shortcut = x
        y = self.relu(self.normalised(self.conv(x, channels, width, edge, 1)))
        y = self.relu(self.normalised(self.conv(y, width, width, edge, 3, stride)))
        y = self.normalised(self.conv(y, width, 4 * width, edge // stride, 1))
        if project:
            shortcut = self.normalised(self.conv(x, channels, 4 * width, edge, 1, stride))
        return self.unary(self.add(y, shortcut))


def resnet(blocks: Sequence[int], batch: int = 1, *, training: bool = False) -> Graph:
    """A ResNet with bottlenecks at 224 x 224; inference, or one step of training."""
    net = _ResNet(batch, training)
    build = net.build
    image = build.input(batch * 3 * 224**2 * FLOAT_BYTES)
    x = net.relu(net.normalised(net.conv(image, 3, 64, 224, 7, 2, first=True)))
    x = net.pool(x, batch * 56**2 * 64 * FLOAT_BYTES, batch * 56**2 * 64 * 9)
    channels, edge = 64, 56
    for stage, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True)):
        for block in range(count):
            stride = 2 if block == 0 and stage > 0 else 1
            x = net.block(x, channels, width, edge, stride, block == 0)
            edge, channels = edge // stride, 4 * width
    x = net.pool(x, batch * 2048 * FLOAT_BYTES, batch * 2048 * 49)
    weight = build.weight(2048 * 1000 * FLOAT_BYTES)
    flops = 2 * batch * 2048 * 1000
    y = build.kernel((x, weight), batch * 1000 * FLOAT_BYTES, flops)
    if training:
        net.backward.append(net._conv_backward(x, y, weight, flops, False))
        gradients = {y: build.elementwise(y, flops_each=2)}
        for backward in reversed(net.backward):
            backward(gradients)
    return build.graph()


def random_dag(seed: int, kernels: int | None = None) -> Graph:
    """10 to 14 kernels with branches, long edges, weights and workspace."""
    draw = random.Random(seed)
    build = NetworkBuilder()
    count = kernels or draw.randint(10, 14)
    values = [build.input(draw.randint(1, 8) * 1e6)]
    for _ in range(count):
        recent = values[-5:]
        inputs = draw.sample(recent, min(len(recent), draw.choice([1, 1, 2, 2, 3])))
        if values[-1] not in inputs and draw.random() < 0.6:
            inputs.append(values[-1])
        if len(values) > 6 and draw.random() < 0.3:
            inputs.append(draw.choice(values))
        if draw.random() < 0.6:
            inputs.append(build.weight(draw.randint(1, 30) * 1e6))
        size = draw.randint(1, 12) * 1_000_000
        inputs = list(dict.fromkeys(inputs))
        flops = (sum(map(build.size, inputs)) + size) * draw.choice([5, 20, 60, 150])
        values.append(build.kernel(inputs, size, flops, workspace_bytes=draw.choice([0, 0, 2_000_000])))
    return build.graph()


NETWORKS: Mapping[str, Callable[[], Graph]] = {
    "bert": bert,
    "unet": unet,
    "resnet152": lambda: resnet((3, 8, 36, 3), batch=4),
    "resnet50_training": lambda: resnet((3, 4, 6, 3), batch=64, training=True),
}
