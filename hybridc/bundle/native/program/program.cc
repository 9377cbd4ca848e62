#include "program/program.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
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

// Ports are as large as the tensors behind them, whose places the verifier has checked.
void CheckPorts(const Json& json, const std::vector<Port>& ports, const std::vector<std::string>& names,
                const ir::Graph& graph) {
  if (ports.size() != names.size()) json.Refuse("its graph has another number of inputs or outputs");
  std::map<std::string, int64_t> sizes;
  for (const ir::Tensor& tensor : graph.tensors) sizes[tensor.name] = tensor.size_bytes;
  for (size_t i = 0; i < ports.size(); ++i) {
    if (ports[i].size_bytes != sizes.at(names[i])) {
      json.Refuse("its graph has another size of " + Quoted(ports[i].name));
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
  CheckPorts(json, program.inputs, graph.inputs, graph);
  CheckPorts(json, results, graph.outputs, graph);
  return ir::Bind(graph, plan, signatures, ReadWeights(json["weights"], weights_bytes));
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
