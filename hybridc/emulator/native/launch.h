// Runs the blocks of one kernel launch on a pool of host threads, and survives kernels that crash.
#pragma once
#include <cstdint>
#include <vector>

#include "counting/accesses.h"
#include "kernel_abi.h"

namespace emulator {

struct Launch {
  const KernelEntry* kernel;
  const KernelEntry* counted;  // the same, compiled to be counted; nullptr: no accesses are counted
  Extent grid, block;
  size_t dynamic_shared_bytes;
  std::vector<uint64_t> argument_words;  // arguments by value, each on a word boundary
  std::vector<size_t> argument_offsets;  // in words
};

// Mirrored by ctypes in counting.py.
struct LaunchCounts {
  const char* kernel;
  uint64_t blocks, counted_blocks;
  AccessCounts accesses;  // of the counted blocks
};

// Of the launches with a `counted` kernel since the list was last emptied.
std::vector<LaunchCounts>& counted_launches();

// Fails the device if the kernel does something wrong.
void run_launch(Launch& launch);

}  // namespace emulator
