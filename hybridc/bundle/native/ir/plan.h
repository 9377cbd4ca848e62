// Graphs and plans as hybridc/ir has them, with the names that files have: nothing is known of them before `Verify`.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "program/json.h"
#include "program/program.h"

namespace hybridc::ir {

enum class Device { kGpu, kCpu };
enum class Role { kInput, kWeight, kActivation, kState, kOutput };
enum class BufferKind { kTensor, kWeight, kWorkspace };

constexpr size_t kLanes = 4;  // the GPU, the CPU, copies to the GPU, copies to the host
constexpr int64_t kAlignmentBytes = 512;

struct Tensor {
  std::string name, dtype;
  std::vector<int64_t> shape;
  Role role;
  int64_t size_bytes;
};

// A value that a kernel looks at before it uses it.
struct Check {
  std::string node, op;
  CheckKind kind;
  int64_t lower, upper;
  std::string tensor;  // whose elements are the values; empty: they are computed
};

// A kernel runs only if a condition, a tensor of one bool in the host's memory, has this value.
struct Guard {
  std::string tensor;
  bool value;

  bool operator==(const Guard&) const = default;
};

struct Kernel {
  std::string name, function;
  std::vector<std::string> inputs, outputs;
  std::vector<std::array<std::string, 2>> may_overwrite;  // an output, and the input whose bytes it may take
  std::array<int64_t, 2> workspace_bytes;                 // by device
  std::array<bool, 2> has_code;
  std::vector<Check> checks;
  std::vector<std::string> choice;  // of `where` for one condition: condition, taken, other; empty: no such kernel
  std::vector<Guard> guards;        // it runs only if all hold, looked at in order
};

struct Graph {
  std::vector<Tensor> tensors;
  std::vector<Kernel> kernels;
  std::vector<std::string> inputs, outputs;
  std::vector<std::array<std::string, 2>> carried;  // an input, and the output that the next run takes in its place
  std::vector<std::array<std::string, 2>> parts;    // tensors that are one input or output of the model

  // Where in `names`, the graph's inputs or outputs, the tensors of each of the model's are.
  std::vector<std::vector<size_t>> Ports(const std::vector<std::string>& names) const;
};

// Runs a kernel, or copies a tensor.
struct Step {
  bool is_copy;
  std::string name;  // of the kernel or tensor
  Device source;     // of a copy
  Device target;     // of a copy, or where the kernel runs
  std::vector<int64_t> waits;
  double us;

  // Its number, below `kLanes`.
  size_t lane() const { return (is_copy ? 2 : 0) + (target == Device::kGpu ? 0 : 1); }
};

struct Buffer {
  std::string name;  // of a tensor, or of the kernel whose workspace it is
  BufferKind kind;
  Device device;
  int64_t offset_bytes, size_bytes, first_step, last_step;

  int64_t end_bytes() const { return offset_bytes + size_bytes; }
};

struct Arena {
  Device device;
  int64_t size_bytes;
};

struct Plan {
  std::vector<Step> steps;
  std::vector<Buffer> buffers;
  std::vector<Arena> arenas;
  std::optional<int64_t> budget_bytes;
  double makespan_us, time_bound_us;

  int64_t ArenaBytes(Device device) const;
};

// Bits of an element of a tensor; throws HC303 for a type that no tensor may have.
int64_t ReadBits(const Json& dtype);

std::vector<int64_t> ReadExtents(const Json& json);
Device ReadDevice(const Json& json);

// As `graph_to_json` and `plan_to_json` of hybridc/ir write them. Throw HC303 for a value of another type, or a number
// that nothing in memory can have; afterwards sums of a few of them are below 2**63.
Graph ReadGraph(const Json& json);
Plan ReadPlan(const Json& json);

}  // namespace hybridc::ir
