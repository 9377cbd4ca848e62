"""What goes into an artifact, collected from what the compiler made."""

from __future__ import annotations

from hybridc.artifact.manifest import Port, Source
from hybridc.artifact.store import Contents
from hybridc.frontend import ImportedModel, ValueInfo
from hybridc.passes.phases import LoweredNetwork


def contents_of(
    model: ImportedModel, network: LoweredNetwork, cuda_source: str | None, cuda_image_key: str | None
) -> Contents:
    """The contents of the artifact of a model, apart from the library and the bytes of weights.

    `cuda_source` is the CUDA C of its kernels, `cuda_image_key` the key of what it was compiled to
    (`emulator.image_key`); None without a GPU.
    """
    options = network.job.options
    return Contents(
        graphs=network.graphs,
        plans=network.plans,
        pins=network.pins,
        lowered=network.lowered.plans,
        target=options.target,
        inputs=_ports(model.inputs),
        outputs=_ports(model.outputs),
        source=Source(model.source.name, model.source.sha256, model.source.opset),
        machine=network.machine,
        host_memory_bytes=options.host_memory_bytes,
        cuda_source=cuda_source,
        cuda_image_key=cuda_image_key,
        threads=options.threads,
    )


def _ports(values: tuple[ValueInfo, ...]) -> tuple[Port, ...]:
    return tuple(Port(v.name, v.shape, v.dtype) for v in values)
