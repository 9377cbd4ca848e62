// Lets CUDA C++ as TVM generates it compile with g++: qualifiers, built-in variables, barriers, warp
// operations and device math. The translator in kernels.py includes it in front of the source.
//
// Each library of kernels includes it: <algorithm>, of which two functions would be needed, took a third of the
// time that g++ has for a small one.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include <cuda.h>
#include <vector_functions.h>
#include <vector_types.h>

#include "kernel_abi.h"

#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __restrict__
#undef __grid_constant__
#define __global__ static inline
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

// int, where CUDA has unsigned: signed arithmetic may not wrap, so that g++ sees a loop over threadIdx.x
// as a loop over consecutive addresses and vectorises it. All values fit.
struct BuiltinIndex {
  int x, y, z;
};

// Kept here, not in the driver, so that g++ sees through them. The translator gives each kernel local copies.
static thread_local BuiltinIndex threadIdx, blockIdx, blockDim, gridDim;
static constexpr int warpSize = 32;

namespace cuda_on_cpu {

static thread_local unsigned char *static_shared, *dynamic_shared;
static thread_local unsigned long entered_blocks;  // by this host thread
inline const emulator::BlockServices* services;  // one for all translation units of the library

static inline BuiltinIndex to_index(const emulator::Extent& extent) {
  return {static_cast<int>(extent.x), static_cast<int>(extent.y), static_cast<int>(extent.z)};
}

// Sources are resolved before the exchange, so that a lane's value is taken when the warp is complete.
template <class T>
T exchange(unsigned site, uint32_t mask, T value, int source_lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a warp exchange moves at most 8 bytes");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  word = services->warp_exchange(mask, site, word, static_cast<unsigned>(source_lane));
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline int lane() { return static_cast<int>(services->lane()); }

template <class T>
T shuffle(unsigned site, uint32_t mask, T value, int source, int width = 32) {
  return exchange(site, mask, value, (lane() & ~(width - 1)) | (source & (width - 1)));
}

template <class T>
T shuffle_down(unsigned site, uint32_t mask, T value, int delta, int width = 32) {
  const int own = lane();
  return exchange(site, mask, value, (own & (width - 1)) + delta < width ? own + delta : own);
}

template <class T>
T shuffle_up(unsigned site, uint32_t mask, T value, int delta, int width = 32) {
  const int own = lane();
  return exchange(site, mask, value, (own & (width - 1)) >= delta ? own - delta : own);
}

template <class T>
T shuffle_xor(unsigned site, uint32_t mask, T value, int lane_mask, int width = 32) {
  const int own = lane(), source = own ^ lane_mask;
  return exchange(site, mask, value, (source & ~(width - 1)) > own ? own : source);
}

// Where one access of a GPU is several here, which are HYBRIDC_UNCOUNTED: tells the driver of the one, in kernels
// that are compiled to be counted. All lanes come to these in the same order, so it needs no place in the code.
#ifdef HYBRIDC_COUNTED_KERNELS
#define HYBRIDC_UNCOUNTED __attribute__((no_sanitize("thread")))
inline void note_access(const void* address, unsigned bytes, bool is_write) {
  const uintptr_t kind = 2 * bytes + is_write;  // in place of a place in the code, which has one kind of access
  services->note_access(address, bytes, is_write, reinterpret_cast<const void*>(kind));
}
#else
#define HYBRIDC_UNCOUNTED
inline void note_access(const void*, unsigned, bool) {}
#endif

inline void warp_barrier(unsigned site, uint32_t mask = ~0u) { services->warp_exchange(mask, site, 0, 0); }

// One kernel as the driver sees it.
template <auto Function>
struct Kernel;

template <class... Arguments, void (*Function)(Arguments...)>
struct Kernel<Function> {
  static constexpr size_t argument_bytes[sizeof...(Arguments) + 1] = {sizeof(Arguments)..., 0};

  template <size_t... I>
  static inline __attribute__((always_inline)) void call(void** arguments, std::index_sequence<I...>) {
    Function(*static_cast<std::remove_cv_t<Arguments>*>(arguments[I])...);
  }

  static void run_thread(void** arguments) { call(arguments, std::index_sequence_for<Arguments...>{}); }

  static void run_block(void** arguments) {
    const BuiltinIndex block = blockDim;
    for (int z = 0; z < block.z; ++z)
      for (int y = 0; y < block.y; ++y)
        for (int x = 0; x < block.x; ++x) {
          threadIdx = {x, y, z};
          call(arguments, std::index_sequence_for<Arguments...>{});
        }
  }

  static void enter_thread(const emulator::Extent* index) { threadIdx = to_index(*index); }

  static void enter_block(const emulator::Extent* grid, const emulator::Extent* block,
                          const emulator::Extent* index, unsigned char* shared, unsigned char* dynamic) {
    gridDim = to_index(*grid);
    blockDim = to_index(*block);
    blockIdx = to_index(*index);
    static_shared = shared;
    dynamic_shared = dynamic;
    ++entered_blocks;
  }

  static emulator::KernelEntry entry(const char* name, size_t shared_bytes, bool needs_fibers) {
    return {name,        sizeof...(Arguments), argument_bytes, shared_bytes, needs_fibers,
            &run_thread, &run_block,           &enter_thread,  &enter_block};
  }
};

}  // namespace cuda_on_cpu

// __COUNTER__ tells the call sites apart in the text; their addresses would not do, as g++ duplicates
// and merges code.
#define __syncthreads() ::cuda_on_cpu::services->block_barrier(__COUNTER__)
#define __syncwarp(...) ::cuda_on_cpu::warp_barrier(__COUNTER__ __VA_OPT__(, ) __VA_ARGS__)
#define __activemask() ::cuda_on_cpu::services->active_mask()
#define __shfl_sync(...) ::cuda_on_cpu::shuffle(__COUNTER__, __VA_ARGS__)
#define __shfl_down_sync(...) ::cuda_on_cpu::shuffle_down(__COUNTER__, __VA_ARGS__)
#define __shfl_up_sync(...) ::cuda_on_cpu::shuffle_up(__COUNTER__, __VA_ARGS__)
#define __shfl_xor_sync(...) ::cuda_on_cpu::shuffle_xor(__COUNTER__, __VA_ARGS__)

template <class T>
static inline T __ldg(const T* pointer) {
  return *pointer;
}

template <class To, class From>
static inline To same_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

// math_constants.h, which TVM includes for infinities and NaN, is written in terms of these.
static inline float __int_as_float(int bits) { return same_bits<float>(bits); }
static inline int __float_as_int(float value) { return same_bits<int>(value); }
static inline double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
static inline long long __double_as_longlong(double value) { return same_bits<long long>(value); }

static inline float max(float a, float b) { return fmaxf(a, b); }
static inline float min(float a, float b) { return fminf(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }

template <class A, class B>
using CommonInteger =
    std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>, std::common_type_t<A, B>>;

template <class A, class B>
static inline CommonInteger<A, B> max(A a, B b) {
  const CommonInteger<A, B> left = a, right = b;
  return left < right ? right : left;
}

template <class A, class B>
static inline CommonInteger<A, B> min(A a, B b) {
  const CommonInteger<A, B> left = a, right = b;
  return right < left ? right : left;
}

// The fast versions answer as precisely as the others here.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __powf powf
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }

// Blocks run at the same time, so atomics are real ones.
template <class T>
static inline T atomicAdd(T* target, T value) {
  T old = *target, sum;
  do sum = old + value;
  while (!__atomic_compare_exchange(target, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

template <class T>
static inline T atomicMax(T* target, T value) {
  T old = *target, larger;
  do larger = old < value ? value : old;
  while (!__atomic_compare_exchange(target, &old, &larger, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
