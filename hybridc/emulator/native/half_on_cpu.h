// Math on half that NVIDIA's headers declare for the device only, by way of float. On bfloat16 there is none:
// kernels compute in float.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_on_cpu.h"

#define HALF_UNARY(name, function)                                                                          \
  static inline __half name(__half x) { return __float2half(function(__half2float(x))); }

HALF_UNARY(hexp, expf)
HALF_UNARY(hexp2, exp2f)
HALF_UNARY(hlog, logf)
HALF_UNARY(hlog2, log2f)
HALF_UNARY(hlog10, log10f)
HALF_UNARY(hsqrt, sqrtf)
HALF_UNARY(hrsqrt, rsqrtf)
HALF_UNARY(hsin, sinf)
HALF_UNARY(hcos, cosf)
HALF_UNARY(htan, tanf)
HALF_UNARY(hatan, atanf)
HALF_UNARY(htanh, tanhf)
HALF_UNARY(herf, erff)
HALF_UNARY(hceil, ceilf)
HALF_UNARY(hfloor, floorf)
HALF_UNARY(htrunc, truncf)
HALF_UNARY(hrint, rintf)
#undef HALF_UNARY

static inline __half hpow(__half x, __half y) {
  return __float2half(powf(__half2float(x), __half2float(y)));
}
