// Runs the blocks of one kernel launch on a pool of host threads, and survives kernels that crash.
#pragma once
#include <cstdint>
#include <vector>

#include "kernel_abi.h"

namespace emulator {

struct Launch {
  const KernelEntry* kernel;
  Extent grid, block;
  size_t dynamic_shared_bytes;
  std::vector<uint64_t> argument_words;  // arguments by value, each on a word boundary
  std::vector<size_t> argument_offsets;  // in words
};

// Fails the device if the kernel does something wrong.
void run_launch(Launch& launch);

}  // namespace emulator
