"""Networks for images and sets in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from tests.exports.architecture import Architecture, ids, mask, normal, uniform

IMAGES = {"batch": (2, 3), "height": (32, 48), "width": (32, 32)}


class Block(nn.Module):
    """A residual block that the time embedding shifts."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(4, inner), nn.GroupNorm(4, outer)
        self.inlet, self.outlet = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.time = nn.Linear(time, outer)
        self.short = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.inlet(f.silu(self.first(x))) + self.time(f.silu(time))[:, :, None, None]
        return self.short(x) + self.outlet(f.silu(self.second(y)))


class Attending(nn.Module):
    """Pixels attend to each other, then to words."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.norm, self.own = nn.GroupNorm(4, width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.layer = nn.LayerNorm(width)
        self.words = nn.MultiheadAttention(width, 2, kdim=words, vdim=words, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        batch, channels, height, width = image.shape
        x = self.norm(image).reshape(batch, channels, height * width).transpose(1, 2)
        x = x + self.own(x, x, x, need_weights=False)[0]
        x = x + self.words(self.layer(x), words, words, need_weights=False)[0]
        left, gate = self.wide(x).chunk(2, dim=-1)
        x = x + self.narrow(left * f.gelu(gate))
        return image + x.transpose(1, 2).reshape(batch, channels, height, width)


class Diffusion(nn.Module):
    """Removes noise from a small image, told the time and some words."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.inlet = nn.Conv2d(4, 16, 3, padding=1)
        self.down, self.smaller = Block(16, 16, 32), nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.middle, self.attending = Block(16, 24, 32), Attending(24, 20)
        self.larger, self.up = nn.Conv2d(24, 16, 3, padding=1), Block(32, 16, 32)
        self.norm, self.outlet = nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, image: Tensor, time: Tensor, words: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(8) * (-math.log(10000.0) / 8)).to(image.dtype)
        angles = time[:, None] * rates[None]
        told = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        x = first = self.down(self.inlet(image), told)
        x = self.attending(self.middle(self.smaller(x), told), words)
        x = self.larger(f.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.outlet(f.silu(self.norm(self.up(torch.cat([x, first], dim=1), told))))


class Segmenter(nn.Module):
    """A U-Net whose upper layers are upsampled to the size of those they meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.block(3, 8), self.block(8, 16)
        self.third, self.up = self.block(16, 24), nn.ConvTranspose2d(24, 16, 2, stride=2)
        self.last, self.out = self.block(32, 8), nn.Conv2d(16, 5, 1)

    @staticmethod
    def block(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        first = self.first(image)
        second = self.second(f.max_pool2d(first, 2))
        third = self.third(f.avg_pool2d(second, 2))
        x = self.last(torch.cat([self.up(third), second], dim=1))
        x = f.interpolate(x, size=first.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(torch.cat([x, first], dim=1))


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.PReLU(8),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.Softplus(),
        nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1),
        nn.BatchNorm2d(8),
        nn.Mish(),
        nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )


class Mixing(nn.Module):
    """A layer of an MLP-mixer: mixes patches, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Mixer(nn.Module):
    """An MLP-mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 8, stride=8)
        self.layers = nn.Sequential(Mixing(16, 24), Mixing(16, 24))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.layers(self.patches(image).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(dim=1))


class Upscaler(nn.Module):
    """Super-resolution by shuffling channels to pixels, over a bicubic upscaling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        fine = f.pixel_shuffle(self.second(f.leaky_relu(self.first(image), 0.2)), 2)
        return fine + f.interpolate(image, scale_factor=2, mode="bicubic", align_corners=False)


class Aligner(nn.Module):
    """A spatial transformer: predicts an affine map and samples the image there."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 8, 5, stride=4)
        self.map, self.classes = nn.Linear(8, 6), nn.Linear(3 * 16, 5)

    def forward(self, image: Tensor) -> Tensor:
        theta = self.map(f.adaptive_avg_pool2d(f.relu(self.look(image)), 1).flatten(1)).view(-1, 2, 3)
        grid = f.affine_grid(theta, list(image.shape), align_corners=False)
        seen = f.grid_sample(image, grid, align_corners=False)
        return self.classes(f.adaptive_max_pool2d(seen, 4).flatten(1))


class Volume(nn.Module):
    """Convolutions in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8)
        self.second, self.head = nn.Conv3d(8, 12, 3, stride=2, padding=1), nn.Linear(12, 5)

    def forward(self, clip: Tensor) -> Tensor:
        x = f.max_pool3d(f.relu(self.norm(self.first(clip))), 2)
        return self.head(f.relu(self.second(x)).mean(dim=(2, 3, 4)))


class Translator(nn.Module):
    """torch's own Transformer with a causal mask and padded keys."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.both = nn.Transformer(32, 2, 1, 1, 48, batch_first=True, norm_first=True)

    def forward(self, words: Tensor, seen: Tensor, answer: Tensor) -> Tensor:
        length = answer.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.both(
            self.words(words),
            self.words(answer),
            tgt_mask=later,
            tgt_is_causal=True,
            src_key_padding_mask=seen == 0,
            memory_key_padding_mask=seen == 0,
        )


class Recommender(nn.Module):
    """Embeddings of categories that interact with dense features, and the best of many items."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(3))
        self.dense, self.top = nn.Linear(5, 8), nn.Linear(6 + 8, 30)

    def forward(self, dense: Tensor, categories: Tensor) -> tuple[Tensor, Tensor]:
        x = f.relu(self.dense(dense))
        parts = torch.stack([x, *(t(categories[:, i]) for i, t in enumerate(self.tables))], dim=1)
        pairs = parts @ parts.transpose(1, 2)
        rows, columns = torch.triu_indices(4, 4, offset=1)
        scores = self.top(torch.cat([x, pairs[:, rows, columns]], dim=1))
        best = scores.topk(5, dim=1)
        return best.values, best.indices


class Graph(nn.Module):
    """Messages along the edges of a graph are added up at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.messages, self.nodes = nn.Linear(12, 12), nn.Linear(24, 8)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        messages = f.relu(self.messages(nodes[edges[0]]))
        targets = edges[1][:, None].expand_as(messages)
        total = torch.zeros_like(nodes).scatter_add(0, targets, messages)
        return f.log_softmax(self.nodes(torch.cat([nodes, total], dim=1)), dim=1)


class Illustrated(nn.Module):
    """Words and, in the places of word 1, images, as in language models that see."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.images, self.out = nn.Embedding(4, 16), nn.Linear(12, 16), nn.Linear(16, 8)

    def forward(self, words: Tensor, images: Tensor) -> Tensor:
        embedded = self.words(words)
        is_image = (words == 1)[..., None].expand_as(embedded)
        return self.out(f.relu(embedded.masked_scatter(is_image, self.images(images))))


class Chosen(nn.Module):
    """What a mask chooses is computed anew in its place, as by experts, and averaged; pairs are numbered."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(12, 12)

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, chosen = x.clone(), seen > 0
        y[chosen] = f.gelu(self.expert(x[chosen]))
        return y, y[chosen].mean(0), seen.cumsum(1) // 2


PLAIN = {
    "diffusion": Architecture(
        Diffusion,
        {
            "image": normal("batch", 4, "height", "width"),
            "time": uniform("batch"),
            "words": normal("batch", 5, 20),
        },
        {"batch": (2, 3), "height": (16, 24), "width": (16, 16)},
    ),
    "unet": Architecture(Segmenter, {"image": normal("batch", 3, "height", "width")}, IMAGES),
    "autoencoder": Architecture(autoencoder, {"image": normal("batch", 3, "height", "width")}, IMAGES),
    "mixer": Architecture(Mixer, {"image": normal("batch", 3, 32, 32)}, {"batch": (2, 3)}),
    "upscaler": Architecture(
        Upscaler,
        {"image": uniform("batch", 3, "height", "width")},
        {"batch": (1, 2), "height": (12, 16), "width": (16, 20)},
    ),
    "aligner": Architecture(Aligner, {"image": uniform("batch", 3, 32, 32)}, {"batch": (2, 3)}, opset=20),
    "volume": Architecture(Volume, {"clip": normal("batch", 2, 8, 16, 16)}, {"batch": (1, 2)}),
    "translator": Architecture(
        Translator,
        {
            "words": ids(50, "batch", "sequence"),
            "seen": mask("batch", "sequence"),
            "answer": ids(50, "batch", "answer"),
        },
        {"batch": (2, 3), "sequence": (7, 9), "answer": (5, 6)},
    ),
    "illustrated": Architecture(
        Illustrated,
        {"words": ids(4, "batch", "sequence"), "images": normal("batch", "sequence", 12)},
        {"batch": (2, 3), "sequence": (7, 9)},
    ),
    "chosen": Architecture(
        Chosen,
        {"x": normal("batch", "sequence", 12), "seen": mask("batch", "sequence")},
        {"batch": (2, 3), "sequence": (7, 9)},
    ),
    "recommender": Architecture(
        Recommender, {"dense": normal("batch", 5), "categories": ids(20, "batch", 3)}, {"batch": (4, 6)}
    ),
    "graph": Architecture(
        Graph,
        {"nodes": normal("nodes", 12), "edges": ids(6, 2, "edges")},
        {"nodes": (6, 8), "edges": (11, 14)},
    ),
}
