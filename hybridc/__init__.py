"""hybridc: run ONNX models on a GPU too small for them, together with the CPU beside it."""
