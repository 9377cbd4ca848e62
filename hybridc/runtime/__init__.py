"""Running an artifact: needs TVM's runtime libraries and numpy, and neither TVM's compiler nor ours."""

from hybridc.runtime.descriptions import DeviceMemory, ModelMetadata, NodeArg
from hybridc.runtime.group import SessionGroup, open_members
from hybridc.runtime.io_binding import IoBinding
from hybridc.runtime.session import Session, load

__all__ = [
    "DeviceMemory",
    "IoBinding",
    "ModelMetadata",
    "NodeArg",
    "Session",
    "SessionGroup",
    "load",
    "open_members",
]
