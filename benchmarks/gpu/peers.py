"""Networks of the suite in PyTorch on the GPU: resident, compiled, offloaded, split. TF32 is off.

    python -m gpu.peers MODEL [--budgets BYTES,BYTES] [--seconds 1] [--compile] [--half] [--cpu]

The architectures are those of torchvision, cut into a sequence of blocks; times depend on no weights. Inputs
start and outputs end in the host's memory. With a budget there are two ways to hold less on the GPU:

`offload`  all blocks run on the GPU. As many as there is room for stay there; the others' weights are in
           pinned host memory and are copied, while the block before runs, into one of two equal places.
`split`    blocks from the front stay and run on the GPU, the others on the CPU.

What both may hold of weights is the budget less what activations and cuDNN take in a run with everything
resident. With `--half` weights and images are float16 with channels last, as tensor cores take them. Rows
have the most bytes that PyTorch had allocated in a run. Prints a JSON object a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from engines import times_ms
from torch import Tensor, nn

Call = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=NETWORKS)
    parser.add_argument("--budgets", type=lambda text: [int(part) for part in text.split(",")], default=[])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true", help="also what torch.compile makes of it")
    parser.add_argument("--half", action="store_true", help="in float16, with channels last")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, without times: a check of this file")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    blocks, x = NETWORKS[arguments.model](arguments.batch)
    blocks.eval().requires_grad_(False)
    with torch.no_grad():
        expected = blocks(x)
        if arguments.half:
            blocks.half().to(memory_format=torch.channels_last)
            x = x.half() if x.is_floating_point() else x
        if arguments.cpu:
            _check(blocks(x), expected)
            print(json.dumps({"model": arguments.model, "shape": list(expected.shape)}))
            return
        _measure(blocks, x, expected, arguments)


def _check(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-2 if found.dtype == torch.float16 else 1e-3
    largest = expected.abs().max().item()
    assert torch.allclose(found.cpu().float(), expected, rtol=tolerance, atol=tolerance * max(largest, 1.0))


def _measure(blocks: nn.Sequential, x: Tensor, expected: Tensor, arguments: argparse.Namespace) -> None:
    def report(engine: str, run: Call, **more: Any) -> int:
        run()
        torch.cuda.reset_peak_memory_stats()
        run()
        peak_bytes = torch.cuda.max_memory_allocated()
        times = times_ms(lambda: [run().numpy()], arguments.seconds)
        ms = {"ms": round(statistics.median(times), 4), "fastest_ms": round(min(times), 4)}
        row = {"table": "torch", "model": arguments.model, "engine": engine, **more}
        print(json.dumps(row | {"peak_bytes": peak_bytes} | ms), flush=True)
        return peak_bytes

    weights = [block_bytes(block) for block in blocks]
    blocks.cuda()
    _check(blocks(x.cuda()), expected)
    run_bytes = report("eager", lambda: blocks(x.cuda()).cpu()) - sum(weights)
    for budget in arguments.budgets:
        blocks.cpu()
        torch.cuda.empty_cache()
        room = budget - run_bytes
        front = split_point(weights, room)
        report("split", split(blocks, front, x), budget_bytes=budget, gpu_blocks=front)
        blocks.cpu()
        resident = resident_blocks(weights, room)
        if resident is None:
            row = {"table": "torch", "model": arguments.model, "engine": "offload", "budget_bytes": budget}
            print(json.dumps(row | {"fits": False}), flush=True)
            continue
        run = Offloaded(blocks, resident, x)
        _check(run(), expected)
        streamed = sum(size for n, size in enumerate(weights) if n not in resident)
        report("offload", run, budget_bytes=budget, streamed_bytes=streamed)
        run.restore()
    if arguments.compile:
        blocks.cuda()
        compiled = torch.compile(blocks, mode="reduce-overhead")
        report("compile", lambda: compiled(x.cuda()).cpu())


def block_bytes(block: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(block))


def _tensors(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]


# ------------------------------------------------------------------------------------------------ split


def split_point(weights: Sequence[int], room: int) -> int:
    """Blocks from the front whose weights there is room for."""
    return sum(sum(weights[: n + 1]) <= room for n in range(len(weights)))


def split(blocks: nn.Sequential, front: int, x: Tensor) -> Call:
    on_gpu, on_cpu = blocks[:front].cuda(), blocks[front:]

    def run() -> Tensor:
        return on_cpu(on_gpu(x.cuda()).cpu() if front else x)

    return run


# ---------------------------------------------------------------------------------------------- offload


def resident_blocks(weights: Sequence[int], room: int) -> set[int] | None:
    """Blocks that stay: the largest first, so that places for two of the others need little; of all such
    choices that there is room for the one that keeps most. None if there is none."""
    order = sorted(range(len(weights)), key=lambda n: -weights[n])
    best: set[int] | None = None
    for count in range(len(order) + 1):
        kept, rest = order[:count], order[count:]
        places = 2 * max((weights[n] for n in rest), default=0)
        left = room - places - sum(weights[n] for n in kept)
        if left < 0:
            continue
        for n in rest:  # smaller ones for which there is room besides
            if weights[n] <= left:
                kept, left = [*kept, n], left - weights[n]
        if best is None or sum(weights[n] for n in kept) > sum(weights[n] for n in best):
            best = set(kept)
    return best


class Offloaded:
    """Streams the weights of blocks that do not stay, each while the block before runs."""

    def __init__(self, blocks: nn.Sequential, resident: set[int], x: Tensor) -> None:
        self._blocks, self._x = blocks, x
        self._copies = torch.cuda.Stream()
        self._streamed = [n for n, block in enumerate(blocks) if n not in resident and block_bytes(block)]
        for n in resident:
            blocks[n].cuda()
        self._original = {n: [t.data for t in _tensors(blocks[n])] for n in self._streamed}
        self._host = {n: _packed(self._original[n]).pin_memory() for n in self._streamed}
        largest = max((host.numel() for host in self._host.values()), default=0)
        self._places = [torch.empty(largest, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._ready = [torch.cuda.Event() for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)]
        for turn, n in enumerate(self._streamed):
            _point_into(_tensors(blocks[n]), self._places[turn % 2])
        for event in self._free:
            event.record()

    def __call__(self) -> Tensor:
        compute = torch.cuda.current_stream()
        turns = {n: turn for turn, n in enumerate(self._streamed)}
        for first in range(min(2, len(self._streamed))):
            self._fetch(first)
        x = self._x.cuda(non_blocking=True)
        for n, block in enumerate(self._blocks):
            turn = turns.get(n)
            if turn is not None:
                compute.wait_event(self._ready[turn % 2])
            x = block(x)
            if turn is not None:
                self._free[turn % 2].record(compute)
                if turn + 2 < len(self._streamed):
                    self._fetch(turn + 2)
        return x.cpu()

    def _fetch(self, turn: int) -> None:
        host, place = self._host[self._streamed[turn]], turn % 2
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._free[place])
            self._places[place][: host.numel()].copy_(host, non_blocking=True)
            self._ready[place].record(self._copies)

    def restore(self) -> None:
        """Give the blocks their own weights back, on the host."""
        for n, tensors in self._original.items():
            for tensor, data in zip(_tensors(self._blocks[n]), tensors, strict=True):
                tensor.data = data
        self._blocks.cpu()


_ALIGNMENT = 512


def _offsets(tensors: Sequence[Tensor]) -> list[int]:
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT)
    return ends


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, one behind the other."""
    offsets = _offsets(tensors)
    packed = torch.empty(offsets[-1], dtype=torch.uint8)
    for tensor, offset in zip(tensors, offsets, strict=False):
        data = tensor.reshape(-1).view(torch.uint8)
        packed[offset : offset + data.numel()] = data
    return packed


def _point_into(tensors: Sequence[Tensor], place: Tensor) -> None:
    """Let tensors have their data in `place`, as `_packed` lays it out."""
    for tensor, offset in zip(tensors, _offsets(tensors), strict=False):
        size = tensor.numel() * tensor.element_size()
        tensor.data = place[offset : offset + size].view(tensor.dtype).view(tensor.shape)


# --------------------------------------------------------------------------------------------- networks


def _image(batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224)


def _resnet50(batch: int) -> tuple[nn.Sequential, Tensor]:
    from torchvision.models import resnet50

    net = resnet50()
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    head = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    return nn.Sequential(stem, *net.layer1, *net.layer2, *net.layer3, *net.layer4, head), _image(batch)


def _mobilenet_v2(batch: int) -> tuple[nn.Sequential, Tensor]:
    from torchvision.models import mobilenet_v2

    net = mobilenet_v2()
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.classifier)
    return nn.Sequential(*net.features, head), _image(batch)


def _vgg16(batch: int) -> tuple[nn.Sequential, Tensor]:
    from torchvision.models import vgg16

    net = vgg16()
    return nn.Sequential(*net.features, net.avgpool, nn.Flatten(), *net.classifier), _image(batch)


class _Patches(nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.projection, self.token = net.conv_proj, net.class_token
        self.positions = net.encoder.pos_embedding

    def forward(self, x: Tensor) -> Tensor:
        patches = self.projection(x).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions


class _First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def _vit_b16(batch: int) -> tuple[nn.Sequential, Tensor]:
    from torchvision.models import vit_b_16

    net = vit_b_16()
    head = nn.Sequential(net.encoder.ln, _First(), net.heads)
    return nn.Sequential(_Patches(net), *net.encoder.layers, head), _image(batch)


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30522, 768), nn.Embedding(512, 768)
        self.types, self.norm = nn.Embedding(2, 768), nn.LayerNorm(768)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.norm(self.words(ids) + self.positions(positions) + self.types(torch.zeros_like(ids)))


def _bert(batch: int) -> tuple[nn.Sequential, Tensor]:
    layers = [
        nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True) for _ in range(12)
    ]
    return nn.Sequential(_Words(), *layers), torch.randint(30522, (batch, 128))


NETWORKS: dict[str, Callable[[int], tuple[nn.Sequential, Tensor]]] = {
    "resnet50": _resnet50,
    "mobilenet_v2": _mobilenet_v2,
    "vgg16": _vgg16,
    "vit_b16": _vit_b16,
    "bert": _bert,
}

if __name__ == "__main__":
    main()
