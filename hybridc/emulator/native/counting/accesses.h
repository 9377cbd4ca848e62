// What the accesses of a block's warps cost: sectors of global memory, wavefronts of shared memory.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace emulator {

// Mirrored by ctypes in counting.py. Sums over the blocks that were counted; "least" as in
// hybridc/gpu_model/memory.py: if what a warp touches at once lay side by side, or evenly in the banks.
struct AccessCounts {
  uint64_t read_sectors, least_read_sectors, written_sectors, least_written_sectors;
  uint64_t wavefronts, least_wavefronts;

  void add(const AccessCounts& other);
};

// The accesses of one block between two barriers. Threads of a block run one after the other here: the n-th
// access that each thread of a warp makes at a place of the code is taken to be one access of the warp.
class AccessLog {
 public:
  void begin(const void* shared, size_t shared_bytes);
  void note(unsigned thread, const void* address, unsigned bytes, bool is_write, const void* site);
  // Threads have met: what they do from now on is other turns. Adds to the counts.
  void settle();
  const AccessCounts& counts() const { return counts_; }

 private:
  static constexpr unsigned kLanes = 32;

  struct WarpAccess {
    std::array<uintptr_t, kLanes> addresses;
    uint32_t lanes = 0;
  };

  struct Site {
    unsigned bytes;
    bool is_write;
    std::array<uint32_t, kLanes> turns{};  // so far, of each lane
    std::vector<WarpAccess> accesses;      // one for each turn
  };

  // A thread's last read or write, for pairs of halves: CUDA's headers copy them one by one here, and as a whole on
  // a GPU.
  struct Last {
    Site* site = nullptr;
    uintptr_t end = 0;
  };

  bool joins_last(unsigned thread, uintptr_t address, unsigned bytes, bool is_write, Site& site);
  void count(const Site& site, const WarpAccess& access);
  void count_global(const Site& site, const uintptr_t* addresses, size_t lanes);
  void count_shared(const Site& site, const uintptr_t* addresses, size_t lanes);

  AccessCounts counts_{};
  uintptr_t shared_ = 0, shared_end_ = 0;
  std::vector<std::array<Last, 2>> last_;  // read and write, by thread
  std::vector<std::unordered_map<const void*, Site>> sites_;  // by warp
};

}  // namespace emulator
