// The arenas and lanes of a plan: everything of a run that is not about names and feeds. The helper in the artifact's
// library makes and executes them, as it does for sessions of Python.
#pragma once
#include <tvm/ffi/container/tensor.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "library.h"
#include "program/program.h"
#include "system/files.h"
#include "system/staging.h"

namespace hybridc {

// Pages of a file, read when they are used; what is written to them stays in this process.
class Mapping {
 public:
  explicit Mapping(const File& file);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  char* data_ = nullptr;
  size_t size_bytes_;
};

// Lanes of the helper, which end with their owner.
class Lanes {
 public:
  Lanes(const Library& library, bool cuda, int threads);
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // What the helper knows them by.
  int64_t handle() const { return handle_; }

 private:
  const Library& library_;
  const int64_t handle_;
};

// Not safe for several threads at once.
class LoadedPlan {
 public:
  // Throws HC306 where the helper refuses the plan, HC402 without the GPU that it needs, HC405 where that has too
  // little memory, HC407 where it fails, HC408 or HC412 where the host has too little, HC413 for another GPU.
  LoadedPlan(const Program& program, const Plan& plan, const Library& library, const File& weights,
             const std::string& folder, int threads, int64_t host_limit_bytes);
  LoadedPlan(const LoadedPlan&) = delete;
  LoadedPlan& operator=(const LoadedPlan&) = delete;

  // Runs every step. Throws HC560 where a kernel has found a value that its node does not allow.
  void Run();

  // Likewise, and tells when each step began and ended, in microseconds. Later runs are a little slower.
  std::vector<std::pair<double, double>> Measure();

  const Plan& plan() const { return plan_; }

  // Where an input is put before a run, or an output is after it: bytes of the host's arena, of the weights or, of
  // the GPU, none (nullptr).
  char* HostBytes(const Place& place) const;

  void PutOnGpu(int64_t offset, const void* data, int64_t size_bytes) const;
  void GetFromGpu(int64_t offset, void* data, int64_t size_bytes) const;

  int64_t gpu_bytes() const { return SizeOf(gpu_arena_); }
  int64_t host_bytes() const { return SizeOf(host_arena_); }
  int64_t staging_bytes() const { return SizeOf(pinned_); }
  int64_t mapped_bytes() const { return static_cast<int64_t>(mapping_.size_bytes()); }

 private:
  struct Fault {
    int64_t failed, value;
  };

  // A weight that is copied to the GPU in every run.
  struct Streamed {
    size_t operand;
    int64_t size_bytes;
  };

  static int64_t SizeOf(const ffi::Tensor& arena) { return arena.defined() ? arena.shape()[0] : 0; }

  bool NeedsGpu() const { return plan_.gpu_bytes > 0; }
  void AllocateOnGpu();
  void Prepare(int threads);
  std::vector<Streamed> StreamedWeights();
  void Stage(const std::vector<Streamed>& streamed, const Staging& staging);
  void AddSteps();
  void AddStep(const Step& step);
  void GuardStep(const Step& step);
  ffi::Tensor HostArena(int64_t size_bytes, bool pinned, const char* where) const;
  ffi::Tensor ArrayOf(size_t number, bool is_streamed);
  ffi::Tensor View(const ffi::Tensor& arena, int64_t offset, const std::vector<int64_t>& shape, DLDataType dtype) const;
  ffi::Tensor BytesOf(const ffi::Tensor& arena, int64_t offset, int64_t size_bytes) const;
  void ClearFaults();
  // What the last run failed at; "" where it was not at a step.
  std::string FailedStep() const;

  const Plan& plan_;
  const Library& library_;
  const std::string folder_;
  Mapping mapping_;
  ffi::Tensor weights_, gpu_arena_, host_arena_, pinned_, faults_;
  int64_t slot_count_ = 0;
  std::map<size_t, ffi::Tensor> arrays_;  // of operands
  std::map<size_t, int64_t> staged_;      // of streamed weights' operands, the offset in pinned memory
  ffi::Function run_;
  std::unique_ptr<Lanes> lanes_;  // which end before what they work on
};

}  // namespace hybridc
