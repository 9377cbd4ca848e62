"""Running an artifact: needs TVM's runtime libraries and numpy, and neither TVM's compiler nor ours."""

from hybridc.runtime.session import DeviceMemory, NodeArg, Session, load

__all__ = ["DeviceMemory", "NodeArg", "Session", "load"]
