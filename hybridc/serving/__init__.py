"""A server of artifacts that speaks the Open Inference Protocol v2, over HTTP and gRPC.

The protocol is KServe's: its data types and codecs, the HTTP routes and the gRPC service. What is added here
is what a run needs: `model.py` lets KServe call a session, `tensors.py` checks what is fed, `batching.py` has
the queue, `http_server.py` and `grpc_server.py` the limits of the two protocols; begin in `server.py`.
"""

import sys

from hybridc.errors import UsageError

_arguments, sys.argv = sys.argv, sys.argv[:1]  # which KServe reads when it is imported
try:
    import kserve  # noqa: F401
except ImportError as error:
    raise UsageError(
        "HC597", f"serving needs the package {error.name or 'kserve'}", remedy="pip install 'hybridc[serve]'"
    ) from None
finally:
    sys.argv = _arguments
