"""Every operator that is expanded, by domain and name."""

from __future__ import annotations

from collections.abc import Mapping

from hybridc.frontend.expand import (
    attention,
    deformable,
    diffusion,
    flex_attention,
    fused,
    group_query,
    linear,
    normalization,
    resize,
    rotary,
    signal,
    standard,
    standard_attention,
)
from hybridc.frontend.expand.builder import Expansion
from hybridc.frontend.expand.control import loops
from hybridc.frontend.expand.elementwise import elements, single_precision
from hybridc.frontend.expand.functions import by_body
from hybridc.frontend.expand.generated import constants, random
from hybridc.frontend.expand.quantized import block_quantized, embedding, packed_weights, products
from hybridc.frontend.expand.quantized import elementwise as quantized_elementwise
from hybridc.frontend.expand.recurrent import operators as recurrent

MICROSOFT = "com.microsoft"
PREVIEW = "ai.onnx.preview"
"""Of operators that ONNX may still change."""
_BODIES = (
    *("BlackmanWindow", "CausalConvWithState", "Celu", "CenterCropPad"),
    *("HammingWindow", "HannWindow", "LinearAttention", "MeanVarianceNormalization"),
    *("RotaryEmbedding", "SwiGLU", "Swish"),
)
"""Of ONNX's operators with a body those that cannot be imported as they are, or not always right."""

_STANDARD = (
    *(
        block_quantized,
        deformable,
        linear,
        normalization,
        packed_weights,
        products,
        recurrent,
        resize,
        signal,
    ),
    *(single_precision, standard, standard_attention, elements, loops, constants, random),
)
_MICROSOFT = (
    *(attention, block_quantized, diffusion, fused, group_query, normalization),
    *(embedding, quantized_elementwise, products, recurrent, rotary),
)

EXPANSIONS: Mapping[tuple[str, str], Expansion] = {
    **{("", name): by_body for name in _BODIES},
    **{(PREVIEW, name): made for name, made in flex_attention.PREVIEW.items()},
    **{("", name): made for family in _STANDARD for name, made in family.STANDARD.items()},
    **{(MICROSOFT, name): made for family in _MICROSOFT for name, made in family.MICROSOFT.items()},
}


def is_expanded(domain: str, op_type: str) -> bool:
    """Whether an operator of this domain is expanded."""
    return (domain, op_type) in EXPANSIONS
