"""What goes into an artifact, collected from what the compiler made."""

from __future__ import annotations

from collections.abc import Sequence

from hybridc.artifact.manifest import Cut, Interface, OpenDimension, Port, Source
from hybridc.artifact.store import Contents
from hybridc.codegen.library import BuiltLibrary
from hybridc.emulator import image_key
from hybridc.frontend import ImportedModel, ValueInfo
from hybridc.frontend.ranges.opening import Dimension
from hybridc.passes.phases import LoweredNetwork
from hybridc.sizes import Bucket


def contents_of(
    models: Sequence[ImportedModel],
    network: LoweredNetwork,
    library: BuiltLibrary,
    dimensions: Sequence[Dimension] = (),
    buckets: Sequence[Bucket] = (),
) -> Contents:
    """The contents of the artifact of a model, read for each bucket of sizes or just once, lowered and
    compiled to `library`."""
    options, model = network.job.options, models[-1]
    interfaces = [
        Interface(bucket, _ports(each.inputs), _ports(each.outputs), _ports(each.counts))
        for each, bucket in zip(models, buckets or [()], strict=True)
    ]
    return Contents(
        graphs=network.graphs,
        plans=network.plans,
        pins=network.pins,
        lowered=network.lowered,
        target=options.target,
        inputs=interfaces[-1].inputs,
        outputs=interfaces[-1].outputs,
        source=Source(model.source.name, model.source.sha256, model.source.opset),
        machine=network.machine,
        host_memory_bytes=options.host_memory_bytes,
        cuda_source=library.cuda_source,
        cuda_image_key=None if library.cuda_image is None else image_key(library.cuda_image),
        cuda_image_bytes=library.cuda_image_bytes,
        threads=options.threads,
        counts=interfaces[-1].counts,
        dimensions=tuple(OpenDimension(each.name, each.axes) for each in dimensions),
        buckets=tuple(interfaces) if buckets else (),
    )


def _ports(values: tuple[ValueInfo, ...]) -> tuple[Port, ...]:
    return tuple(Port(v.name, v.shape, v.dtype, v.labels, tuple(Cut(*cut) for cut in v.cuts)) for v in values)
