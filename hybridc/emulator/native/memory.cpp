#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

namespace emulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGuardBytes = 64 << 20;  // costs only addresses, and catches strides of whole tensors
constexpr unsigned char kFill = 0xFF;  // fresh memory reads as NaN in every float format, and as -1

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// [guard pages][slack | charged bytes][guard pages]: the data ends at guard pages, so that running over
// the end faults at once. The slack in front cannot fault, so it is checked for damage instead, as are
// the bytes between the requested and the charged size.
struct Allocation {
  char* data;
  size_t requested_bytes, charged_bytes;
  char* mapping;
  size_t mapping_bytes;

  char* slack() const { return mapping + kGuardBytes; }
  char* end() const { return data + requested_bytes; }
};

using Allocations = std::map<const char*, Allocation>;

Allocations& allocations() {
  static auto& value = *new Allocations;
  return value;
}

std::map<const char*, size_t>& pinned() {
  static auto& value = *new std::map<const char*, size_t>;
  return value;
}

// The last entry that starts at or before `pointer`, or end().
template <class Map>
auto covering(Map& map, const void* pointer) {
  auto after = map.upper_bound(static_cast<const char*>(pointer));
  return after == map.begin() ? map.end() : std::prev(after);
}

bool is_untouched(const char* first, const char* last) {
  return std::all_of(first, last, [](char byte) { return static_cast<unsigned char>(byte) == kFill; });
}

// Reports damage once: the fill is restored.
bool is_overrun(char* first, char* last) {
  if (is_untouched(first, last)) return false;
  std::memset(first, kFill, last - first);
  return true;
}

}  // namespace

cudaError_t allocate_device(void** pointer, size_t size_bytes) {
  *pointer = nullptr;
  if (size_bytes == 0) return cudaSuccess;
  const size_t charged = round_up(size_bytes, kAllocationGranularity);
  Statistics& counters = statistics();
  const size_t capacity = configuration().capacity_bytes;
  if (charged < size_bytes || charged > capacity || counters.used_bytes > capacity - charged)
    return cudaErrorMemoryAllocation;
  const size_t body = round_up(charged, kPage), total = body + 2 * kGuardBytes;
  void* mapping = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return cudaErrorMemoryAllocation;
  char* start = static_cast<char*>(mapping);
  if (mprotect(start + kGuardBytes, body, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, total);
    return cudaErrorMemoryAllocation;
  }
  std::memset(start + kGuardBytes, kFill, body);
  char* data = start + kGuardBytes + body - charged;
  allocations()[data] = {data, size_bytes, charged, start, total};
  counters.used_bytes += charged;
  counters.peak_bytes = std::max(counters.peak_bytes, counters.used_bytes);
  ++counters.allocations;
  *pointer = data;
  return cudaSuccess;
}

cudaError_t release_device(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  auto found = allocations().find(static_cast<const char*>(pointer));
  if (found == allocations().end()) return cudaErrorInvalidValue;
  statistics().used_bytes -= found->second.charged_bytes;
  munmap(found->second.mapping, found->second.mapping_bytes);
  allocations().erase(found);
  return cudaSuccess;
}

bool is_device_memory(const void* pointer, size_t size_bytes) {
  auto found = covering(allocations(), pointer);
  if (found == allocations().end()) return false;
  return static_cast<const char*>(pointer) + size_bytes <= found->second.end();
}

cudaError_t allocate_pinned(void** pointer, size_t size_bytes) {
  if (posix_memalign(pointer, kPage, std::max<size_t>(size_bytes, 1)) != 0) return cudaErrorMemoryAllocation;
  pinned()[static_cast<const char*>(*pointer)] = size_bytes;
  return cudaSuccess;
}

cudaError_t release_pinned(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  if (pinned().erase(static_cast<const char*>(pointer)) == 0) return cudaErrorInvalidValue;
  std::free(pointer);
  return cudaSuccess;
}

bool is_pinned_memory(const void* pointer, size_t size_bytes) {
  auto found = covering(pinned(), pointer);
  if (found == pinned().end()) return false;
  return static_cast<const char*>(pointer) + size_bytes <= found->first + found->second;
}

std::string describe_address(const void* address) {
  const char* target = static_cast<const char*>(address);
  const Allocation* nearest = nullptr;
  ptrdiff_t distance = 0;
  for (const auto& [data, allocation] : allocations()) {
    const ptrdiff_t away = target < data ? data - target : std::max<ptrdiff_t>(0, target - allocation.end());
    if (nearest == nullptr || away < distance) nearest = &allocation, distance = away;
  }
  char text[160];
  if (nearest == nullptr || distance > (ptrdiff_t{1} << 32)) {
    std::snprintf(text, sizeof text, "%p, far from any device memory", address);
  } else if (target < nearest->data) {
    std::snprintf(text, sizeof text, "%p, %td bytes before a device allocation of %zu bytes", address,
                  distance, nearest->requested_bytes);
  } else {
    std::snprintf(text, sizeof text, "%p, %td bytes past the end of a device allocation of %zu bytes",
                  address, distance, nearest->requested_bytes);
  }
  return text;
}

std::string find_overrun() {
  for (const auto& [data, allocation] : allocations()) {
    char* charged_end = allocation.data + allocation.charged_bytes;
    const bool before = is_overrun(allocation.slack(), allocation.data);
    const bool after = is_overrun(allocation.end(), charged_end);
    if (before || after)
      return std::string("just ") + (before ? "before" : "past the end of") + " a device allocation of " +
             std::to_string(allocation.requested_bytes) + " bytes";
  }
  return "";
}

}  // namespace emulator
