// What the emulated driver and a library of g++-compiled kernels agree on. Needs no CUDA header.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulator {

struct Extent {
  unsigned x, y, z;
  unsigned long count() const { return static_cast<unsigned long>(x) * y * z; }
};

// Services that a running kernel thread asks of the driver. `site` numbers the call in the source text:
// two barriers at different sites are different barriers, however many threads wait at each.
struct BlockServices {
  void (*block_barrier)(unsigned site);
  // Waits for the lanes of `mask`, then returns the value that `source_lane` brought.
  uint64_t (*warp_exchange)(uint32_t mask, unsigned site, uint64_t value, unsigned source_lane);
  unsigned (*lane)();
  uint32_t (*active_mask)();
  // `site` is the place in the code: of kernels that were compiled to be counted.
  void (*note_access)(const void* address, unsigned bytes, int is_write, const void* site);
};

// One __global__ function.
struct KernelEntry {
  const char* name;
  int argument_count;
  const size_t* argument_bytes;
  size_t static_shared_bytes;
  int needs_fibers;                      // has a barrier, a warp operation or shared memory
  void (*run_thread)(void** arguments);  // the thread that enter_thread named
  void (*run_block)(void** arguments);   // all threads of the block, in a plain loop that g++ can vectorise
  void (*enter_thread)(const Extent* thread_index);
  void (*enter_block)(const Extent* grid, const Extent* block, const Extent* block_index,
                      unsigned char* static_shared, unsigned char* dynamic_shared);
};

}  // namespace emulator
