// Copies from global to shared memory that do not wait for their data (cp.async), a function for each width. The
// emulated GPU has functions of the same names (hybridc/emulator/native/async_copy_on_cpu.h).
//
// A thread's copies since its last commit are a group; their data is there for the thread once it has waited for
// the group, and for others behind a barrier after that.
#pragma once

#if __CUDA_ARCH__ >= 800
// Both addresses are multiples of the width. Where `exists` is false, nothing is read, and zeros are stored. Only
// 16 bytes may pass L1 by.
#define HYBRIDC_COPY(bytes, cached)                                                                             \
  static __device__ __forceinline__ void copy_async_##bytes(void* to, const void* from) {                       \
    asm volatile("cp.async." #cached ".shared.global [%0], [%1], " #bytes ";"                                   \
                 : : "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(from) : "memory");           \
  }                                                                                                             \
  static __device__ __forceinline__ void copy_async_##bytes##_if(void* to, const void* from, bool exists) {     \
    asm volatile("cp.async." #cached ".shared.global [%0], [%1], " #bytes ", %2;"                               \
                 : : "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(from),                       \
                     "r"(exists ? bytes : 0) : "memory");                                                       \
  }
HYBRIDC_COPY(4, ca)
HYBRIDC_COPY(8, ca)
HYBRIDC_COPY(16, cg)
#undef HYBRIDC_COPY

static __device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits for all groups but the last `remaining`.
#define await_copies(remaining) asm volatile("cp.async.wait_group %0;" : : "n"(remaining) : "memory")
#endif
