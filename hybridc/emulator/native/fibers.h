// One thread block whose threads really meet at barriers: a fiber per thread, all on one host thread.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "counting/accesses.h"
#include "kernel_abi.h"

namespace emulator {

class BlockRunner {
 public:
  BlockRunner();

  // Runs one block of `kernel`; returns "" or how the block went wrong. `log` hears of the accesses to memory of
  // a kernel that was compiled to be counted.
  std::string run(const KernelEntry& kernel, void** arguments, const Extent& block, int thread_order,
                  unsigned long seed, AccessLog* log = nullptr);

  static const BlockServices& services();

 private:
  enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kFinished };

  struct Fiber {
    void* stack_pointer;
    State state;
    unsigned site;  // of the barrier or warp operation it waits at
    uint32_t mask;
    uint64_t value;
    unsigned source_lane;
    Extent index;
  };

  struct Warp {
    uint32_t present;  // lanes that exist and have not finished
    uint32_t waiting;
  };

  static BlockRunner& current();
  static void fiber_main();

  void prepare(const Extent& block);
  void arrange(int thread_order, unsigned long seed);
  // Lets every ready thread at these places of the order run until it waits; returns whether there was one.
  bool run_group(size_t first, size_t end);
  void resume(unsigned thread);
  void suspend(State state);
  void release_block();
  void release_warp(unsigned warp);
  std::string describe_stall() const;

  const KernelEntry* kernel_ = nullptr;
  void** arguments_ = nullptr;
  AccessLog* log_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<unsigned> order_;
  std::vector<char*> stacks_;
  void* scheduler_stack_ = nullptr;
  unsigned current_ = 0;
  unsigned at_barrier_ = 0, finished_ = 0;
  std::string error_;
};

}  // namespace emulator
