"""What benchmarks/gpu_model.py is made of: compilers of foreign CUDA C++, published ladders, our own
kernels."""
