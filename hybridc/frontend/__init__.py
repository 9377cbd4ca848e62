"""ONNX in, Relax out: check, simplify, import, and know the origin of every binding.

Codes of refusals are listed in `hybridc.frontend.codes`.
"""

from hybridc.frontend.model import ImportedModel, ModelFile, ValueInfo
from hybridc.frontend.reader import find_refusals, load_model, read_model

__all__ = ["ImportedModel", "ModelFile", "ValueInfo", "find_refusals", "load_model", "read_model"]
