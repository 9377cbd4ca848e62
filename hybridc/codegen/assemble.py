"""What goes into an artifact, collected from what the compiler made."""

from __future__ import annotations

from hybridc.artifact.manifest import Cut, Port, Source
from hybridc.artifact.store import Contents
from hybridc.codegen.library import BuiltLibrary
from hybridc.emulator import image_key
from hybridc.frontend import ImportedModel, ValueInfo
from hybridc.passes.phases import LoweredNetwork


def contents_of(model: ImportedModel, network: LoweredNetwork, library: BuiltLibrary) -> Contents:
    """The contents of the artifact of a model, lowered and compiled to `library`."""
    options = network.job.options
    return Contents(
        graphs=network.graphs,
        plans=network.plans,
        pins=network.pins,
        lowered=network.lowered,
        target=options.target,
        inputs=_ports(model.inputs),
        outputs=_ports(model.outputs),
        source=Source(model.source.name, model.source.sha256, model.source.opset),
        machine=network.machine,
        host_memory_bytes=options.host_memory_bytes,
        cuda_source=library.cuda_source,
        cuda_image_key=None if library.cuda_image is None else image_key(library.cuda_image),
        cuda_image_bytes=library.cuda_image_bytes,
        threads=options.threads,
        counts=_ports(model.counts),
    )


def _ports(values: tuple[ValueInfo, ...]) -> tuple[Port, ...]:
    return tuple(Port(v.name, v.shape, v.dtype, v.labels, tuple(Cut(*cut) for cut in v.cuts)) for v in values)
