// Tells the driver of each access to memory that a kernel makes. With -fsanitize=thread g++ calls the functions
// below before every access that another thread could see, one place of the code each; those of ThreadSanitizer's
// own library are not linked.
#pragma once
#include "cuda_on_cpu.h"

#define HYBRIDC_COUNTED extern "C" __attribute__((visibility("hidden"), no_sanitize("thread")))
#define HYBRIDC_NOTE(address, bytes, is_write) \
  cuda_on_cpu::services->note_access(address, bytes, is_write, __builtin_return_address(0))

HYBRIDC_COUNTED void __tsan_init() {}

#define HYBRIDC_ACCESS(bytes)                                                                          \
  HYBRIDC_COUNTED void __tsan_read##bytes(void* address) { HYBRIDC_NOTE(address, bytes, 0); }           \
  HYBRIDC_COUNTED void __tsan_write##bytes(void* address) { HYBRIDC_NOTE(address, bytes, 1); }          \
  HYBRIDC_COUNTED void __tsan_unaligned_read##bytes(void* address) { HYBRIDC_NOTE(address, bytes, 0); } \
  HYBRIDC_COUNTED void __tsan_unaligned_write##bytes(void* address) { HYBRIDC_NOTE(address, bytes, 1); }
HYBRIDC_ACCESS(1)
HYBRIDC_ACCESS(2)
HYBRIDC_ACCESS(4)
HYBRIDC_ACCESS(8)
HYBRIDC_ACCESS(16)
#undef HYBRIDC_ACCESS

HYBRIDC_COUNTED void __tsan_read_range(void* address, unsigned long bytes) {
  HYBRIDC_NOTE(address, static_cast<unsigned>(bytes), 0);
}
HYBRIDC_COUNTED void __tsan_write_range(void* address, unsigned long bytes) {
  HYBRIDC_NOTE(address, static_cast<unsigned>(bytes), 1);
}

// Atomics are counted as the write that they are on a GPU.
#define HYBRIDC_ATOMIC(bits)                                                                              \
  HYBRIDC_COUNTED int __tsan_atomic##bits##_compare_exchange_strong(int##bits##_t* address,                \
                                                                    int##bits##_t* expected,               \
                                                                    int##bits##_t desired, int, int) {     \
    HYBRIDC_NOTE(address, bits / 8, 1);                                                                    \
    return __atomic_compare_exchange_n(address, expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
  }
HYBRIDC_ATOMIC(32)
HYBRIDC_ATOMIC(64)
#undef HYBRIDC_ATOMIC
