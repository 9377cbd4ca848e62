"""The compiled model on disk, model.hyb/: writing it, and opening it without trusting it."""

from hybridc.artifact.load import Artifact, open_artifact
from hybridc.artifact.manifest import Manifest, Port, Source
from hybridc.artifact.store import Contents, store

__all__ = ["Artifact", "Contents", "Manifest", "Port", "Source", "open_artifact", "store"]
