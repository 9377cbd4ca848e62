// Device memory under an exact cap, between guard pages, and the register of pinned host memory.
#pragma once
#include <cstddef>
#include <string>

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

// Where `address` lies as seen from the nearest allocation, for a report of a stray access.
std::string describe_address(const void* address);

// "" unless bytes beside an allocation, that nobody owns, were overwritten since they were last checked.
std::string find_overrun();

}  // namespace emulator
