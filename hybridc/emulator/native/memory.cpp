#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

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
  const char* kind;  // for reports
  std::vector<std::pair<std::string, std::vector<TensorRange>>> launches;  // what kernels may touch of it

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

// Memory between guard pages, filled; nullptr if the system has none.
char* map_guarded(size_t size_bytes, const char* kind) {
  const size_t charged = round_up(size_bytes, kAllocationGranularity);
  const size_t body = round_up(charged, kPage), total = body + 2 * kGuardBytes;
  void* mapping = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(mapping);
  if (mprotect(start + kGuardBytes, body, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, total);
    return nullptr;
  }
  std::memset(start + kGuardBytes, kFill, body);
  char* data = start + kGuardBytes + body - charged;
  allocations()[data] = {data, size_bytes, charged, start, total, kind, {}};
  return data;
}

void unmap_guarded(Allocations::iterator found) {
  munmap(found->second.mapping, found->second.mapping_bytes);
  allocations().erase(found);
}

// A function has a kernel, or several with numbers behind the name of the first.
bool is_kernel_of(const std::string& kernel, const std::string& first) {
  return kernel.compare(0, first.size(), first) == 0 &&
         (kernel.size() == first.size() || kernel[first.size()] == '_');
}

// The one that holds a tensor of the kernel at `offset`: of several that begin there, as an output may take the
// place of an input, the longest. nullptr if none does.
const TensorRange* tensor_at(const std::vector<TensorRange>& tensors, size_t offset) {
  const TensorRange* found = nullptr;
  for (const TensorRange& tensor : tensors)
    if (tensor.has_tensor_at(offset) && (found == nullptr || tensor.end() > found->end())) found = &tensor;
  return found;
}

// What holds the tensors at these offsets, as the steps have it that give the kernel tensors at all of them;
// none if there is no such step. These steps run one function, so their tensors have the same sizes.
std::vector<TensorRange> tensors_at(const Allocation& arena, const std::string& kernel,
                                    const std::vector<size_t>& offsets) {
  std::vector<TensorRange> merged;
  for (const auto& [name, tensors] : arena.launches) {
    if (!is_kernel_of(kernel, name)) continue;
    std::vector<TensorRange> found;
    for (size_t offset : offsets)
      if (const TensorRange* tensor = tensor_at(tensors, offset)) found.push_back(*tensor);
    if (found.size() != offsets.size()) continue;
    if (merged.empty()) merged = found;
    for (size_t i = 0; i < offsets.size(); ++i)
      if (found[i].end() > merged[i].end()) merged[i] = found[i];
  }
  return merged;
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
  char* data = map_guarded(size_bytes, "device allocation");
  if (data == nullptr) return cudaErrorMemoryAllocation;
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
  unmap_guarded(found);
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
  statistics().pinned_bytes += size_bytes;
  return cudaSuccess;
}

cudaError_t release_pinned(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const auto found = pinned().find(static_cast<const char*>(pointer));
  if (found == pinned().end()) return cudaErrorInvalidValue;
  statistics().pinned_bytes -= found->second;
  pinned().erase(found);
  std::free(pointer);
  return cudaSuccess;
}

bool is_pinned_memory(const void* pointer, size_t size_bytes) {
  auto found = covering(pinned(), pointer);
  if (found == pinned().end()) return false;
  return static_cast<const char*>(pointer) + size_bytes <= found->first + found->second;
}

cudaError_t add_tensors(void* arena, const char* kernel, std::vector<TensorRange> tensors) {
  auto found = allocations().find(static_cast<const char*>(arena));
  if (found == allocations().end()) return cudaErrorInvalidValue;
  found->second.launches.emplace_back(kernel, std::move(tensors));
  return cudaSuccess;
}

std::string GuardedTensors::replace(const std::string& kernel, const std::vector<void**>& pointers) {
  for (auto& [data, arena] : allocations()) {
    if (arena.launches.empty()) continue;
    std::vector<size_t> offsets;
    std::vector<void**> inside;
    for (void** pointer : pointers) {
      if (*pointer < arena.data || *pointer >= arena.end()) continue;
      inside.push_back(pointer);
      offsets.push_back(static_cast<char*>(*pointer) - arena.data);
    }
    if (inside.empty()) continue;
    const std::vector<TensorRange> tensors = tensors_at(arena, kernel, offsets);
    if (tensors.empty()) return "no step of the plan gives it tensors at these places";
    for (size_t i = 0; i < inside.size(); ++i) {
      char* copy = copy_of(arena.data + tensors[i].offset_bytes, tensors[i].size_bytes);
      if (copy == nullptr) return "no memory for guarded tensors";
      *inside[i] = copy + (offsets[i] - tensors[i].offset_bytes);
    }
    return "";
  }
  return "";
}

char* GuardedTensors::copy_of(char* tensor, size_t size_bytes) {
  for (const Copy& known : copies_)
    if (known.tensor == tensor) return known.copy;  // an output that takes the place of an input
  char* copy = map_guarded(size_bytes, "tensor");
  if (copy == nullptr) return nullptr;
  std::memcpy(copy, tensor, size_bytes);
  copies_.push_back({tensor, copy, size_bytes});
  return copy;
}

void GuardedTensors::write_back() const {
  for (const Copy& copy : copies_) std::memcpy(copy.tensor, copy.copy, copy.size_bytes);
}

GuardedTensors::~GuardedTensors() {
  for (const Copy& copy : copies_) unmap_guarded(allocations().find(copy.copy));
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
    std::snprintf(text, sizeof text, "%p, %td bytes before a %s of %zu bytes", address, distance,
                  nearest->kind, nearest->requested_bytes);
  } else {
    std::snprintf(text, sizeof text, "%p, %td bytes past the end of a %s of %zu bytes", address, distance,
                  nearest->kind, nearest->requested_bytes);
  }
  return text;
}

std::string find_overrun() {
  for (const auto& [data, allocation] : allocations()) {
    char* charged_end = allocation.data + allocation.charged_bytes;
    const bool before = is_overrun(allocation.slack(), allocation.data);
    const bool after = is_overrun(allocation.end(), charged_end);
    if (before || after)
      return std::string("just ") + (before ? "before" : "past the end of") + " a " + allocation.kind + " of " +
             std::to_string(allocation.requested_bytes) + " bytes";
  }
  return "";
}

}  // namespace emulator
