#include "program/program.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <utility>

#include "program/json.h"
#include "refusal.h"

namespace hybridc {
namespace {

namespace ffi = tvm::ffi;

constexpr char kFormat[] = "hybridc-program";
constexpr int64_t kSchemaVersion = 2;
constexpr int64_t kArrayAlignmentBytes = 64;  // what the vector instructions of kernels assume
constexpr int64_t kFaultBytes = 16;           // a row of faults
constexpr int64_t kLargestRank = 32;
constexpr int64_t kLargestCount = int64_t{1} << 32;
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
constexpr char kMakeAgain[] = "make the bundle again, by the hybridc that this runtime is of";

constexpr std::array<std::pair<const char*, Space>, 5> kSpaces = {{{"gpu", Space::kGpu},
                                                                   {"cpu", Space::kCpu},
                                                                   {"weights", Space::kWeights},
                                                                   {"inputs", Space::kInputs},
                                                                   {"faults", Space::kFaults}}};

Space ReadSpace(const Json& json) {
  const std::string name = json.Text();
  for (const auto& [known, space] : kSpaces) {
    if (name == known) return space;
  }
  json.Refuse(Quoted(name) + " is no place of bytes");
}

std::vector<int64_t> ReadShape(const Json& json) {
  std::vector<int64_t> shape = json.Each([](const Json& extent) { return extent.Size(); });
  if (shape.size() > kLargestRank) json.Refuse("it has too many dimensions");
  return shape;
}

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
  Port port{json["name"].Text(), json["dtype"].Text(), ReadShape(json["shape"]), ReadElementBytes(json["dtype"])};
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

Operand ReadOperand(const Json& json) {
  Operand operand{ReadSpace(json["in"]), json["device"].Text() == "gpu", json["offset_bytes"].Size(),
                  ReadShape(json["shape"])};
  try {
    operand.dtype = ffi::StringToDLDataType(json["dtype"].Text());
  } catch (const ffi::Error&) {
    json["dtype"].Refuse("it is no type of elements");
  }
  if (operand.space == Space::kInputs) json["in"].Refuse("inputs are in arenas");
  const int64_t alignment = operand.space == Space::kFaults ? kFaultBytes : kArrayAlignmentBytes;
  if (operand.offset_bytes % alignment != 0) json["offset_bytes"].Refuse("it is not aligned");
  return operand;
}

Step ReadStep(const Json& json, int64_t operand_count) {
  Step step;
  step.name = json["name"].Text();
  step.planned_us = json["us"].Number();
  step.lane = json["lane"].Whole(0, kLargestCount);
  step.waits = json["waits"].Each([](const Json& event) { return event.Whole(0, kLargestCount); });
  if (!json["function"].IsNull()) step.function = json["function"].Text();
  step.operands = json["operands"].Each(
      [&](const Json& number) { return static_cast<size_t>(number.Whole(0, operand_count - 1)); });
  step.event = json["event"].IsNull() ? -1 : json["event"].Whole(0, kLargestCount);
  step.guards = json["guards"].Each([&](const Json& guard) {
    return Guard{static_cast<size_t>(guard["operand"].Whole(0, operand_count - 1)), guard["value"].Whole(0, 1) == 1};
  });
  if (!step.function.has_value() && step.operands.size() != 2) json.Refuse("a copy has a source and a target");
  return step;
}

CheckKind ReadCheckKind(const Json& json) {
  const std::string kind = json.Text();
  if (kind == "divisor") return CheckKind::kDivisor;
  return kind == "trips" ? CheckKind::kTrips : CheckKind::kIndex;
}

ValueCheck ReadCheck(const Json& json, int64_t input_count) {
  ValueCheck check{json["node"].Text(), json["operator"].Text(), ReadCheckKind(json["kind"]),
                   json["lower"].Whole(kLeast, kMost), json["upper"].Whole(kLeast, kMost)};
  if (!json["input"].IsNull()) check.input = static_cast<size_t>(json["input"].Whole(0, input_count - 1));
  return check;
}

Upload ReadUpload(const Json& json) {
  return {json["offset_bytes"].Size(), json["arena_offset_bytes"].Size(), json["size_bytes"].Size()};
}

// Places of ports, each within what it is a part of.
std::vector<Place> ReadPlaces(const Json& json, const std::vector<Port>& ports, const std::vector<Port>& inputs,
                              const Plan& plan, int64_t weights_bytes, bool is_output) {
  const std::vector<Json> elements = json.Each();
  if (elements.size() != ports.size()) json.Refuse("there must be " + std::to_string(ports.size()));
  std::vector<Place> places;
  for (size_t i = 0; i < ports.size(); ++i) {
    const Json& element = elements[i];
    if (element.IsNull() && !is_output) {  // an input that nothing reads
      places.emplace_back();
      continue;
    }
    const Place place{ReadSpace(element["in"]), element["offset"].Size()};
    const int64_t size_bytes = ports[i].size_bytes;
    int64_t end = 0;
    switch (place.space) {
      case Space::kGpu:
        end = plan.gpu_bytes;
        break;
      case Space::kCpu:
        end = plan.host_bytes;
        break;
      case Space::kWeights:
        end = is_output ? weights_bytes : 0;
        break;
      case Space::kInputs: {
        const bool is_there = is_output && place.offset < static_cast<int64_t>(inputs.size());
        if (!is_there || inputs[place.offset].size_bytes != size_bytes) element.Refuse("there is no such input");
        places.push_back(place);
        continue;
      }
      default:
        element.Refuse("arrays of users are not there");
    }
    if (place.offset > end || size_bytes > end - place.offset) element.Refuse("it leaves what it lies in");
    places.push_back(place);
  }
  return places;
}

Plan ReadPlan(const Json& json, const Program& program, int64_t weights_bytes) {
  Plan plan;
  plan.promised_bytes = json["promised_bytes"].Size();
  plan.gpu_bytes = json["gpu_bytes"].Size();
  plan.host_bytes = json["host_bytes"].Size();
  plan.uploads = json["uploads"].Each(ReadUpload);
  plan.operands = json["operands"].Each(ReadOperand);
  const int64_t operand_count = static_cast<int64_t>(plan.operands.size());
  plan.steps = json["steps"].Each([&](const Json& step) { return ReadStep(step, operand_count); });
  std::vector<Port> results = program.outputs;
  results.insert(results.end(), program.counts.begin(), program.counts.end());
  plan.inputs = ReadPlaces(json["inputs"], program.inputs, program.inputs, plan, weights_bytes, false);
  plan.outputs = ReadPlaces(json["outputs"], results, program.inputs, plan, weights_bytes, true);
  const int64_t input_count = static_cast<int64_t>(program.inputs.size());
  plan.checks = json["checks"].Each([&](const Json& check) { return ReadCheck(check, input_count); });
  return plan;
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

}  // namespace

bool Program::HasGpuCode() const {
  return std::any_of(plans.begin(), plans.end(), [](const Plan& plan) { return plan.gpu_bytes > 0; });
}

Program ReadProgram(const std::string& path, const std::string& content, int64_t weights_bytes) {
  const Json json = Json::Parse(path, content);
  if (json["format"].Text() != kFormat) throw Refusal("HC301", "this is no bundle's program", path, kMakeAgain);
  CheckVersions(path, json);
  Program program;
  program.target = json["target"].Text();
  program.cpu_flags = ReadTexts(json["cpu_flags"]);
  program.cuda_architectures = ReadTexts(json["cuda_architectures"]);
  program.threads = json["threads"].IsNull() ? 0 : json["threads"].Whole(1, kLargestCount);
  program.host_memory_bytes = json["host_memory_bytes"].IsNull() ? 0 : json["host_memory_bytes"].Whole(1, kMost);
  program.inputs = json["inputs"].Each(ReadPort);
  program.outputs = json["outputs"].Each(ReadPort);
  program.counts = json["counts"].Each(ReadPort);
  CheckCuts(json, program);
  program.plans = json["plans"].Each([&](const Json& plan) { return ReadPlan(plan, program, weights_bytes); });
  if (program.plans.empty()) json["plans"].Refuse("there is none");
  return program;
}

}  // namespace hybridc
