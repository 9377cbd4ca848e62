"""hybridc_runtime: runs bundles of hybridc on computers that have Python and numpy, and no compiler.

    session = hybridc_runtime.load("net")              # a folder that `hybridc bundle` has written
    outputs = session.run(None, {"x": x})

It is libhybridc_runtime.so with the API of `hybridc.load`. The wheel hybridc-runtime, which
`python -m hybridc.bundle.wheel` writes, has this folder under the name hybridc_runtime, and the library in
its folder `lib`.
"""

from .descriptions import BucketInfo, DeviceMemory, ModelMetadata, NodeArg
from .errors import ArtifactError, DeviceError, HybridcError, PlanError, UsageError
from .io_binding import IoBinding
from .session import Device, Session, load

__all__ = [
    "ArtifactError",
    "BucketInfo",
    "Device",
    "DeviceError",
    "DeviceMemory",
    "HybridcError",
    "IoBinding",
    "ModelMetadata",
    "NodeArg",
    "PlanError",
    "Session",
    "UsageError",
    "load",
]
