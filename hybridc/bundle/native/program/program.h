// program.json: what a bundle's runs do, checked as it is read. docs/artifact_format.md describes it.
#pragma once
#include <tvm/ffi/dtype.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hybridc {

// An axis of an output of which data determine how many elements there are: the first ones count.
struct Cut {
  size_t axis;
  size_t count;  // which of the counts says how many
};

// An input, an output, or a count: a single int64 number by which outputs are cut.
struct Port {
  std::string name, dtype;
  std::vector<int64_t> shape;
  int64_t element_bytes;
  int64_t size_bytes;
  std::vector<Cut> cuts;
};

enum class Space { kNone, kGpu, kCpu, kWeights, kInputs, kFaults };

// Where an input is put before a run, or an output found after it: an offset into an arena or the weights, or
// the number of the plan's input that it is.
struct Place {
  Space space = Space::kNone;
  int64_t offset = 0;
};

// A tensor that is an input or output of the model, or a part of one: its rows, one after the other at its place, are
// apart in the array that users know.
struct PortTensor {
  Place place;
  size_t port = 0;  // the number of the input, or of the output or count behind outputs
  int64_t rows = 0, row_bytes = 0;
  int64_t begin_bytes = 0, stride_bytes = 0;  // of rows in the array

  // Where a byte of the tensor is in the array.
  int64_t OffsetOf(int64_t position) const {
    return begin_bytes + position / row_bytes * stride_bytes + position % row_bytes;
  }
};

// An array that a function is called with, or that is copied.
struct Operand {
  Space space;
  bool on_gpu;
  int64_t offset_bytes;
  std::vector<int64_t> shape;
  DLDataType dtype;
};

// A step is executed only if the bool in the host's memory has this value.
struct Guard {
  size_t operand;
  bool value;
};

struct Step {
  std::string name;  // of the kernel, or of the tensor that is copied
  double planned_us;
  int64_t lane;
  std::vector<int64_t> waits;           // events
  std::optional<std::string> function;  // none: a copy
  std::vector<size_t> operands;
  int64_t event;  // -1: none
  std::vector<Guard> guards;
};

enum class CheckKind { kIndex, kDivisor, kTrips };

// A value that a kernel looks at before it uses it.
struct ValueCheck {
  std::string node, op;
  CheckKind kind;
  int64_t lower, upper;
  std::optional<size_t> input;  // of the plan, whose elements are the values; none: they are computed
};

// A weight that lies in the GPU's arena from load to unload.
struct Upload {
  int64_t offset_bytes, arena_offset_bytes, size_bytes;
};

struct Plan {
  int64_t promised_bytes;  // GPU memory that a run never exceeds
  int64_t gpu_bytes, host_bytes;
  double predicted_us;
  std::vector<Upload> uploads;
  std::vector<Operand> operands;
  std::vector<Step> steps;
  std::vector<PortTensor> inputs, outputs;  // outputs, the counts behind them, and second parts behind all
  std::vector<ValueCheck> checks;
};

// The model that was compiled.
struct Source {
  std::string name, sha256;
  int64_t opset;
};

struct Program {
  Source source;
  std::string hybridc, tvm, tvm_ffi;  // versions
  std::string target;  // with the instruction set that was chosen for this processor
  std::vector<std::string> cpu_flags, cuda_architectures;
  int64_t threads;            // 0: all cores
  int64_t host_memory_bytes;  // 0: no limit of its own
  std::vector<Port> inputs, outputs, counts;
  std::vector<Plan> plans;  // of that instruction set, for increasing budgets

  bool HasGpuCode() const;
};

constexpr size_t kLargestProgramBytes = size_t{1} << 28;

// Reads graphs and plans, lets the verifier check each, and binds them. Throws HC301 where it is something else, HC302
// where it is of another version, HC303 where it is malformed, HC306 where the verifier refuses a plan, or a plan does
// not fit its functions and weights.
Program ReadProgram(const std::string& path, const std::string& content, int64_t weights_bytes);

}  // namespace hybridc
