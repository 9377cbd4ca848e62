// The one emulated device: how it is configured, what it counted, and how it failed.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <string>

namespace emulator {

enum ThreadOrder : int { kForward = 0, kReverse = 1, kShuffled = 2, kWarps = 3 };

// Mirrored by ctypes in device.py.
struct Configuration {
  uint64_t capacity_bytes;
  int32_t present;  // 0: a driver without a device, enough to compile for CUDA
  int32_t compute_major, compute_minor;
  int32_t thread_order;
  int32_t lazy_streams;
  int32_t worker_count;
  int32_t guard_tensors;
  int32_t refuse_graphs;
};

// Mirrored by ctypes in device.py.
struct Statistics {
  uint64_t used_bytes, peak_bytes, capacity_bytes, allocations, launches;
  uint64_t h2d_copies, h2d_bytes, d2h_copies, d2h_bytes, graph_launches;
  uint64_t pinned_bytes, streams, events, graphs;
};

// All state lives as long as the process: TVM releases device memory from destructors that run after
// ours would have.
Configuration& configuration();
Statistics& statistics();

// One host thread at a time is inside the device. Recursive, since synchronising runs queued work.
std::recursive_mutex& device_mutex();
using DeviceLock = std::lock_guard<std::recursive_mutex>;

// A kernel's failure poisons the device, as on real hardware: every later call but releasing returns it.
void fail_device(cudaError_t error, const std::string& message);
cudaError_t device_failure();
const char* device_failure_message();  // "" while there is none
void clear_device_failure();

// Opt-in limit of shared memory per block (CUDA C programming guide, compute capability tables).
size_t opt_in_shared_bytes();
constexpr size_t kDefaultSharedBytes = 48 << 10;

}  // namespace emulator
