// How much pinned memory streamed weights get on the host, as hybridc/runtime/staging.py decides it: room for all
// of them, or for a few slots that they go through, each read from its file shortly before its copy.
#pragma once
#include <cstdint>
#include <vector>

namespace hybridc {

constexpr int64_t kAlignmentBytes = 512;  // as ir/plan.py has it

inline int64_t Aligned(int64_t size_bytes) {
  return (size_bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
}

struct Staging {
  int64_t size_bytes;
  int64_t slot_count;  // 0: it holds all streamed weights
};

// `limit_bytes` is what a run may hold of the host's memory; 0: weights take at most half of what is available.
// Throws HC408 where even the smallest slots exceed the limit.
Staging ChooseStaging(const std::vector<int64_t>& weight_bytes, int64_t arena_bytes, int64_t limit_bytes,
                      int64_t available_bytes);

// Throws HC408 where a run needs more host memory than there is room for.
void CheckRoom(int64_t needed_bytes, int64_t room_bytes);

}  // namespace hybridc
