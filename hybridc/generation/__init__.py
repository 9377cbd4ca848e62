"""Text from a compiled decoder: a session that keeps the cache of keys and values, and how tokens are chosen.

Begin with `session.py`. `form.py` says which artifacts are decoders, `sampling.py` and `text.py` are pure.
"""

from hybridc.generation.sampling import Sampling
from hybridc.generation.session import GenerationSession

__all__ = ["GenerationSession", "Sampling"]
