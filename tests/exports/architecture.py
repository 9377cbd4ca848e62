"""What is exported: a module with random weights, and what it is fed, whose dimensions may have names."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Fed:
    """An input: a tensor of a kind, drawn from its name."""

    kind: str
    """`normal`, `uniform`, `zeros`, `ids` below `limit`, or `seen` (ones), or a `mask` whose rows end with
    zeros."""
    dims: tuple[int | str, ...]
    limit: int = 0

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)

    def drawn(self, name: str, sizes: Mapping[str, int]) -> Tensor:
        shape = self.shape(sizes)
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if self.kind == "normal":
            return torch.randn(shape, generator=random)
        if self.kind == "uniform":
            return torch.rand(shape, generator=random)
        if self.kind == "zeros":
            return torch.zeros(shape)
        if self.kind == "ids":
            return torch.randint(1, self.limit, shape, generator=random)
        if self.kind == "seen":
            return torch.ones(shape, dtype=torch.long)
        lengths = torch.arange(shape[0]).remainder(3)
        return (torch.arange(shape[-1]) < shape[-1] - lengths[:, None]).long()


@dataclass(frozen=True, slots=True)
class Architecture:
    """A network that can be exported."""

    module: Callable[[], nn.Module]
    """With positional operands in the order of `inputs`; returns a tensor or a tuple of tensors."""
    inputs: Mapping[str, Fed]
    sizes: Mapping[str, tuple[int, int]]
    """Of named dimensions: what the network is exported with, and what an export with open dimensions is
    run with."""
    opset: int | None = None
    """That exports with `dynamo` have; drawn where it is not given."""


def normal(*dims: int | str) -> Fed:
    return Fed("normal", dims)


def uniform(*dims: int | str) -> Fed:
    return Fed("uniform", dims)


def ids(limit: int, *dims: int | str) -> Fed:
    return Fed("ids", dims, limit)


def mask(*dims: int | str) -> Fed:
    return Fed("mask", dims)


class Calling(nn.Module):
    """A model of transformers with positional operands and plain tensors as results."""

    def __init__(
        self, model: nn.Module, names: Sequence[str], results: Sequence[str], **constants: Any
    ) -> None:
        super().__init__()
        self.model, self.names, self.results, self.constants = model, names, results, constants

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**dict(zip(self.names, operands, strict=True)), **self.constants)
        return tuple(found[name] for name in self.results)


def made(model: str, config: str, *, part: str = "", **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers, or a part of it, with a configuration of these options."""

    def build() -> nn.Module:
        import transformers

        whole = getattr(transformers, model)(getattr(transformers, f"{config}Config")(**options))
        return whole.get_submodule(part) if part else whole

    return build


def calling(
    model: Callable[[], nn.Module],
    inputs: Mapping[str, Fed],
    results: Sequence[str],
    sizes: Mapping[str, tuple[int, int]],
    **constants: Any,
) -> Architecture:
    """A model of transformers that is called by names."""
    return Architecture(lambda: Calling(model(), list(inputs), results, **constants), inputs, sizes)


def randomized(module: nn.Module) -> nn.Module:
    """The module for inference, with seeded weights under which all parts of it matter.

    Activations keep their size, and neither biases are 0 nor scales 1.
    """
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(noise * 0.1)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=random) * 0.1)
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=random) + 0.5)
    return module.eval()
