// Device memory under an exact cap, between guard pages, and the register of pinned host memory.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "device.h"

namespace emulator {

// cudaMalloc hands out multiples of this; the cap counts them.
constexpr size_t kAllocationGranularity = 512;

cudaError_t allocate_device(void** pointer, size_t size_bytes);
cudaError_t release_device(void* pointer);
bool is_device_memory(const void* pointer, size_t size_bytes);

cudaError_t allocate_pinned(void** pointer, size_t size_bytes);
cudaError_t release_pinned(void* pointer);
bool is_pinned_memory(const void* pointer, size_t size_bytes);

// A tensor in an allocation; or workspace, in which a kernel lays out tensors of its own.
struct TensorRange {
  size_t offset_bytes, size_bytes;
  bool is_workspace;

  size_t end() const { return offset_bytes + size_bytes; }
  // Whether a tensor of the kernel may begin at `offset`.
  bool has_tensor_at(size_t offset) const {
    return offset == offset_bytes || (is_workspace && offset > offset_bytes && offset < end());
  }
};

// A launch of `kernel` may touch these tensors of the allocation at `arena`, and nothing else of it.
cudaError_t add_tensors(void* arena, const char* kernel, std::vector<TensorRange> tensors);

// While a kernel runs: copies of the tensors that it is given, each between guard pages of its own and away
// from all others; its workspace is one of them. Does nothing for allocations of which nobody has told what tensors they hold.
class GuardedTensors {
 public:
  GuardedTensors() = default;
  GuardedTensors(const GuardedTensors&) = delete;
  ~GuardedTensors();

  // Puts the addresses of copies in the place of those of tensors. Returns "" or what is wrong with them.
  std::string replace(const std::string& kernel, const std::vector<void**>& pointers);
  // What the kernel wrote into the copies becomes that of the tensors.
  void write_back() const;

 private:
  struct Copy {
    char *tensor, *copy;
    size_t size_bytes;
  };
  char* copy_of(char* tensor, size_t size_bytes);

  std::vector<Copy> copies_;
};

// Where `address` lies as seen from the nearest allocation, for a report of a stray access.
std::string describe_address(const void* address);

// "" unless bytes beside an allocation, that nobody owns, were overwritten since they were last checked.
std::string find_overrun();

}  // namespace emulator
