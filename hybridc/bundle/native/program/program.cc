#include "program/program.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "ir/bind.h"
#include "ir/plan.h"
#include "ir/verify.h"
#include "program/json.h"
#include "refusal.h"
#include "system/host.h"

namespace hybridc {
namespace {

constexpr char kFormat[] = "hybridc-program";
constexpr int64_t kSchemaVersion = 3;
constexpr int64_t kArrayAlignmentBytes = 64;  // what the vector instructions of kernels assume
constexpr int64_t kLargestCount = int64_t{1} << 32;
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
constexpr char kMakeAgain[] = "make the bundle again, by the hybridc that this runtime is of";

int64_t CountElements(const Json& json, const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t extent : shape) {
    if (__builtin_mul_overflow(count, extent, &count)) json.Refuse("it has too many elements");
  }
  return count;
}

// Of an input or output: callers know how large their arrays are by this name.
int64_t ReadElementBytes(const Json& json) {
  const std::string dtype = json.Text();
  if (dtype == "bool") return 1;
  const size_t digits = dtype.find_first_of("0123456789");
  const std::string kind = dtype.substr(0, digits);
  if (digits == std::string::npos || (kind != "float" && kind != "bfloat" && kind != "int" && kind != "uint")) {
    json.Refuse("it is no type of elements");
  }
  const int bits = std::atoi(dtype.c_str() + digits);
  if (bits < 1 || bits > 64 || (bits & (bits - 1)) != 0) json.Refuse("it is no type of elements");
  return std::max(bits / 8, 1);
}

Port ReadPort(const Json& json) {
  Port port{json["name"].Text(), json["dtype"].Text(), ir::ReadExtents(json["shape"]), ReadElementBytes(json["dtype"])};
  if (__builtin_mul_overflow(CountElements(json, port.shape), port.element_bytes, &port.size_bytes)) {
    json.Refuse("it has too many elements");
  }
  const int64_t rank = static_cast<int64_t>(port.shape.size());
  port.cuts = json["cuts"].Each([rank](const Json& cut) {
    return Cut{static_cast<size_t>(cut["axis"].Whole(0, rank - 1)),
               static_cast<size_t>(cut["count"].Whole(0, kLargestCount))};
  });
  return port;
}

ir::Parameter ReadParameter(const Json& json) {
  ir::Parameter parameter{json["dtype"].Text(), ir::ReadExtents(json["shape"]), json["layout"].Whole(0, kMost), 0};
  parameter.size_bytes = CountElements(json, parameter.shape) * (ir::ReadBits(json["dtype"]) / 8);
  return parameter;
}

ir::Signatures ReadSignatures(const Json& json) {
  ir::Signatures signatures;
  for (const Json& function : json.Each()) {
    signatures[{function["name"].Text(), ir::ReadDevice(function["device"])}] =
        function["parameters"].Each(ReadParameter);
  }
  return signatures;
}

// Each within the file.
ir::WeightOffsets ReadWeights(const Json& json, int64_t weights_bytes) {
  ir::WeightOffsets offsets;
  for (const Json& weight : json.Each()) {
    const ir::Parameter stored = ReadParameter(weight);
    const int64_t offset = weight["offset_bytes"].Size();
    if (offset % kArrayAlignmentBytes != 0) weight["offset_bytes"].Refuse("it is not aligned");
    if (offset > weights_bytes || stored.size_bytes > weights_bytes - offset) weight.Refuse("it leaves the weights");
    offsets.emplace(ir::WeightKey(weight["tensor"].Text(), stored.layout, stored.dtype, stored.shape), offset);
  }
  return offsets;
}

// The axis along which tensors together have the shape of a port; none: they do not.
std::optional<size_t> JoinedAxis(const std::vector<int64_t>& shape, const std::vector<const ir::Tensor*>& parts) {
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    int64_t extent = 0;
    const auto fits = [&](const ir::Tensor* part) {
      std::vector<int64_t> others = part->shape;
      if (others.size() == shape.size()) extent += std::exchange(others[axis], shape[axis]);
      return others == shape;
    };
    if (std::all_of(parts.begin(), parts.end(), fits) && extent == shape[axis]) return axis;
  }
  return std::nullopt;
}

// Tells a plan's inputs or outputs which ports they are. These are as large as the tensors behind them, whose places
// the verifier has checked.
void SetPorts(const Json& json, const std::vector<Port>& ports, const std::vector<std::string>& names,
              const ir::Graph& graph, std::vector<PortTensor>* made) {
  const std::vector<std::vector<size_t>> positions = graph.Ports(names);
  size_t count = 0;
  for (const std::vector<size_t>& each : positions) count += each.size();
  if (ports.size() != positions.size() || count != names.size()) {
    json.Refuse("its graph has another number of inputs or outputs");
  }
  std::map<std::string, const ir::Tensor*> by_name;
  for (const ir::Tensor& tensor : graph.tensors) by_name[tensor.name] = &tensor;
  for (size_t i = 0; i < ports.size(); ++i) {
    const std::vector<int64_t>& shape = ports[i].shape;
    std::vector<const ir::Tensor*> tensors;
    int64_t size_bytes = 0, begin_bytes = 0;
    for (size_t position : positions[i]) {
      tensors.push_back(by_name.at(names[position]));
      size_bytes += tensors.back()->size_bytes;
    }
    // a port may see its one tensor through a reshape
    const std::optional<size_t> axis = tensors.size() == 1 ? 0 : JoinedAxis(shape, tensors);
    if (size_bytes != ports[i].size_bytes || !axis.has_value()) {
      json.Refuse("its graph has another size of " + Quoted(ports[i].name));
    }
    if (size_bytes == 0) continue;
    const int64_t rows = std::accumulate(shape.begin(), shape.begin() + static_cast<int64_t>(*axis), int64_t{1},
                                         std::multiplies<int64_t>());
    for (size_t part = 0; part < tensors.size(); ++part) {
      PortTensor& tensor = (*made)[positions[i][part]];
      const int64_t row_bytes = tensors[part]->size_bytes / rows;
      tensor = {tensor.place, i, rows, row_bytes, begin_bytes, size_bytes / rows};
      begin_bytes += row_bytes;
    }
  }
}

Plan ReadPlan(const Json& json, const Program& program, const std::vector<ir::Graph>& graphs,
              const ir::Signatures& signatures, int64_t weights_bytes) {
  const ir::Graph& graph = graphs.at(json["graph"].Whole(0, static_cast<int64_t>(graphs.size()) - 1));
  const ir::Plan plan = ir::ReadPlan(json);
  ir::Verify(graph, plan);
  std::vector<Port> results = program.outputs;
  results.insert(results.end(), program.counts.begin(), program.counts.end());
  Plan bound = ir::Bind(graph, plan, signatures, ReadWeights(json["weights"], weights_bytes));
  SetPorts(json, program.inputs, graph.inputs, graph, &bound.inputs);
  SetPorts(json, results, graph.outputs, graph, &bound.outputs);
  return bound;
}

void CheckVersions(const std::string& path, const Json& json) {
  if (json["schema_version"].Whole(kLeast, kMost) != kSchemaVersion) {
    const std::string found = std::to_string(json["schema_version"].Whole(kLeast, kMost));
    throw Refusal("HC302", "program schema " + found + ", but this runtime reads " + std::to_string(kSchemaVersion),
                  path, kMakeAgain);
  }
  if (const std::string found = json["tvm_ffi"].Text(); found != HYBRIDC_TVM_FFI_VERSION) {
    throw Refusal("HC302", "made with apache-tvm-ffi " + found + ", but this runtime has " HYBRIDC_TVM_FFI_VERSION,
                  path, kMakeAgain);
  }
}

void CheckCuts(const Json& json, const Program& program) {
  for (const Port& port : program.outputs) {
    for (const Cut& cut : port.cuts) {
      if (cut.count >= program.counts.size()) json.Refuse("an output is cut by a count that there is not");
    }
  }
  for (const Port& count : program.counts) {
    if (count.size_bytes != sizeof(int64_t) || count.dtype != "int64") json.Refuse("a count is not one int64 number");
  }
}

std::vector<std::string> ReadTexts(const Json& json) {
  return json.Each([](const Json& text) { return text.Text(); });
}

// The position of the richest that this processor has, of the poorest if it has none.
int64_t ChooseInstructionSet(const Json& json, Program& program) {
  const std::vector<Json> sets = json.Each();
  if (sets.empty()) json.Refuse("there is none");
  size_t chosen = sets.size() - 1;
  while (chosen > 0 && !MissingCpuFlags(ReadTexts(sets[chosen]["cpu_flags"])).empty()) --chosen;
  program.target = sets[chosen]["target"].Text();
  program.cpu_flags = ReadTexts(sets[chosen]["cpu_flags"]);
  return static_cast<int64_t>(chosen);
}

}  // namespace

bool Program::HasGpuCode() const {
  return std::any_of(plans.begin(), plans.end(), [](const Plan& plan) { return plan.gpu_bytes > 0; });
}

Program ReadProgram(const std::string& path, const std::string& content, int64_t weights_bytes) {
  const Json json = Json::Parse(path, content);
  if (json["format"].Text() != kFormat) throw Refusal("HC301", "this is no bundle's program", path, kMakeAgain);
  CheckVersions(path, json);
  Program program;
  const Json source = json["source"];
  program.source = {source["name"].Text(), source["sha256"].Text(), source["opset"].Whole(0, kMost)};
  program.hybridc = json["hybridc"].Text();
  program.tvm = json["tvm"].Text();
  program.tvm_ffi = json["tvm_ffi"].Text();
  const int64_t instruction_set = ChooseInstructionSet(json["instruction_sets"], program);
  program.cuda_architectures = ReadTexts(json["cuda_architectures"]);
  program.threads = json["threads"].IsNull() ? 0 : json["threads"].Whole(1, kLargestCount);
  program.host_memory_bytes = json["host_memory_bytes"].IsNull() ? 0 : json["host_memory_bytes"].Whole(1, kMost);
  program.inputs = json["inputs"].Each(ReadPort);
  program.outputs = json["outputs"].Each(ReadPort);
  program.counts = json["counts"].Each(ReadPort);
  CheckCuts(json, program);
  const std::vector<ir::Graph> graphs = json["graphs"].Each(ir::ReadGraph);
  const ir::Signatures signatures = ReadSignatures(json["functions"]);
  for (const Json& plan : json["plans"].Each()) {
    if (plan["instruction_set"].Whole(0, kLargestCount) != instruction_set) continue;
    program.plans.push_back(ReadPlan(plan, program, graphs, signatures, weights_bytes));
  }
  if (program.plans.empty()) json["plans"].Refuse("there is none");
  return program;
}

}  // namespace hybridc
