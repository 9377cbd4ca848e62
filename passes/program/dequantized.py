"""What a quantized constant stands for."""

from __future__ import annotations

import numpy as np


def dequantized(
    values: np.ndarray, scale: np.ndarray, zero: np.ndarray, axis: int, dtype: str = "float32"
) -> np.ndarray:
    """`(values - zero) * scale` as ONNX's DequantizeLinear has it: scale and zero point are one number, or
    one for each element of `axis`."""

    def along(parameter: np.ndarray) -> np.ndarray:
        if parameter.size == 1:
            return parameter.reshape(())  # of a tensor that may have no axes
        shape = [1] * values.ndim
        shape[axis] = -1
        return parameter.reshape(shape)

    return ((values.astype(np.int32) - along(zero).astype(np.int32)) * along(scale)).astype(dtype)
