"""Every architecture by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.exports.architecture import Architecture
from tests.exports.families.decoders import DECODERS
from tests.exports.families.detection import DETECTION
from tests.exports.families.encoders import ENCODERS
from tests.exports.families.images import IMAGE_NETWORKS
from tests.exports.families.pairs import PAIRS
from tests.exports.families.plain import PLAIN
from tests.exports.families.recurrent import RECURRENT

ARCHITECTURES: Mapping[str, Architecture] = {
    **ENCODERS,
    **DECODERS,
    **PAIRS,
    **IMAGE_NETWORKS,
    **RECURRENT,
    **PLAIN,
    **DETECTION,
}
