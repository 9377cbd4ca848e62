// Asynchronous copies on the CPU: the functions of hybridc/codegen/native/async_copy.h.
#pragma once
#include <deque>
#include <vector>

#include "cuda_on_cpu.h"

namespace cuda_on_cpu {

struct Copy {
  void* to;
  const void* from;  // null: zeros
  size_t bytes;
};

// A thread's copies whose data is not there yet: groups, the last one not committed.
struct PendingCopies {
  unsigned long block = 0;  // that the thread is of
  std::deque<std::vector<Copy>> groups{1};
};

HYBRIDC_UNCOUNTED static PendingCopies& pending_copies() {
  static thread_local PendingCopies all[1024];
  PendingCopies& own = all[(threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x];
  if (own.block != entered_blocks) own = {entered_blocks};  // nobody waited for those of a block that ended
  return own;
}

// Data comes as late as it may, with the wait for it, and until then its place holds NaN: reading it too early
// shows, and so does a copy to a place that another thread still reads.
HYBRIDC_UNCOUNTED static void copy_async(void* to, const void* from, size_t bytes, bool exists) {
  // hardware refuses addresses that are not aligned; here an access to address 0 fails
  if ((reinterpret_cast<uintptr_t>(to) | (exists ? reinterpret_cast<uintptr_t>(from) : 0)) % bytes)
    *static_cast<volatile char*>(nullptr) = 0;
  if (exists) note_access(from, bytes, false);
  note_access(to, bytes, true);
  std::memset(to, 0xff, bytes);
  pending_copies().groups.back().push_back({to, exists ? from : nullptr, bytes});
}

}  // namespace cuda_on_cpu

#define HYBRIDC_COPY(bytes)                                                                            \
  static inline void copy_async_##bytes(void* to, const void* from) {                                  \
    cuda_on_cpu::copy_async(to, from, bytes, true);                                                    \
  }                                                                                                    \
  static inline void copy_async_##bytes##_if(void* to, const void* from, bool exists) {                \
    cuda_on_cpu::copy_async(to, from, bytes, exists);                                                  \
  }
HYBRIDC_COPY(4)
HYBRIDC_COPY(8)
HYBRIDC_COPY(16)
#undef HYBRIDC_COPY

static inline void commit_copies() { cuda_on_cpu::pending_copies().groups.emplace_back(); }

HYBRIDC_UNCOUNTED static inline void await_copies(unsigned remaining) {
  auto& groups = cuda_on_cpu::pending_copies().groups;
  for (; groups.size() > remaining + 1; groups.pop_front())
    for (const cuda_on_cpu::Copy& copy : groups.front()) {
      if (copy.from == nullptr) std::memset(copy.to, 0, copy.bytes);
      else std::memcpy(copy.to, copy.from, copy.bytes);
    }
}
