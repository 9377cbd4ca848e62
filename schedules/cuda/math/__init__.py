"""Elementary functions that CUDA names differently from TVM."""
