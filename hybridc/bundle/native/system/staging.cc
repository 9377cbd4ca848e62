#include "system/staging.h"

#include <algorithm>
#include <limits>
#include <string>

#include "refusal.h"

namespace hybridc {
namespace {

constexpr int64_t kSlots = 3;
constexpr int64_t kLargestSlotBytes = 16 << 20, kSmallestSlotBytes = 64 << 10;

}  // namespace

Staging ChooseStaging(const std::vector<int64_t>& weight_bytes, int64_t arena_bytes, int64_t limit_bytes,
                      int64_t available_bytes) {
  int64_t all_bytes = 0, largest_bytes = 0;
  for (int64_t size : weight_bytes) {
    if (__builtin_add_overflow(all_bytes, Aligned(size), &all_bytes)) all_bytes = std::numeric_limits<int64_t>::max();
    largest_bytes = std::max(largest_bytes, Aligned(size));
  }
  const int64_t room_bytes = limit_bytes == 0 ? available_bytes / 2 : limit_bytes - arena_bytes;
  if (all_bytes <= room_bytes) return {all_bytes, 0};
  const int64_t room_each_bytes = std::max<int64_t>(room_bytes, 0) / kSlots / kAlignmentBytes * kAlignmentBytes;
  const int64_t slot_bytes = std::min({largest_bytes, kLargestSlotBytes, room_each_bytes});
  const int64_t smallest_bytes = std::min(largest_bytes, kSmallestSlotBytes);
  if (limit_bytes != 0 && (slot_bytes < smallest_bytes || room_bytes < 0)) {
    const int64_t needed_bytes = arena_bytes + std::min(all_bytes, kSlots * smallest_bytes);
    throw Refusal("HC408",
                  "a run needs at least " + std::to_string(needed_bytes) + " bytes of host memory, but " +
                      std::to_string(limit_bytes) + " are allowed",
                  "", "raise the limit, or compile with a larger --gpu-memory");
  }
  return {kSlots * std::max(slot_bytes, smallest_bytes), kSlots};
}

void CheckRoom(int64_t needed_bytes, int64_t room_bytes) {
  if (needed_bytes <= room_bytes) return;
  throw Refusal("HC408",
                "a run needs " + std::to_string(needed_bytes) + " bytes of host memory, but " +
                    std::to_string(room_bytes) + " are available",
                "", "close other programs, or compile for another batch size, --host-memory or --gpu-memory");
}

}  // namespace hybridc
