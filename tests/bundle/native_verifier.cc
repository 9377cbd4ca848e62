// Answers a line for each line of JSON that it reads, with a graph and a plan: the code of what the verifier refuses, or
// "ok"; and if there are functions and weights, what the bound steps do, as the tests print those of hybridc/ir/bind.py.
#include <algorithm>
#include <iostream>

#include "ir/bind.cc"
#include "ir/read.cc"
#include "ir/verify.cc"
#include "program/json.cc"
#include "refusal.h"

using namespace hybridc;

std::string Text(const Operand& operand) {
  const char* const places[] = {"none", "gpu", "cpu", "weights", "inputs", "faults"};
  std::string text = std::string(places[static_cast<int>(operand.space)]) + "[" + std::to_string(operand.offset_bytes) +
                     "] " + std::string(tvm::ffi::DLDataTypeToString(operand.dtype)) + "[";
  for (size_t i = 0; i < operand.shape.size(); ++i) text += (i > 0 ? "," : "") + std::to_string(operand.shape[i]);
  return text + "]" + (operand.space == Space::kFaults && operand.on_gpu ? "@gpu" : "");
}

std::string Text(const Plan& plan, const Step& step) {
  std::string text = std::to_string(step.lane) + ":";
  std::vector<int64_t> waits = step.waits;
  std::sort(waits.begin(), waits.end());
  for (int64_t wait : waits) text += " wait " + std::to_string(wait);
  for (const Guard& guard : step.guards) {
    text += " if " + Text(plan.operands[guard.operand]) + " is " + (guard.value ? "True" : "False");
  }
  text += " " + step.function.value_or("copy");
  for (size_t number : step.operands) text += " " + Text(plan.operands[number]);
  return text + " record " + std::to_string(step.event) + ";";
}

std::string Answer(const Json& json) {
  const ir::Graph graph = ir::ReadGraph(json["graph"]);
  const ir::Plan plan = ir::ReadPlan(json["plan"]);
  ir::Verify(graph, plan);
  if (!json.Has("functions")) return "ok";
  const auto parameter = [](const Json& each) {
    ir::Parameter read{each["dtype"].Text(), ir::ReadExtents(each["shape"]), each["layout"].Size(), 0};
    read.size_bytes = ir::ReadBits(each["dtype"]) / 8;
    for (int64_t extent : read.shape) read.size_bytes *= extent;
    return read;
  };
  ir::Signatures signatures;
  for (const Json& each : json["functions"].Each()) {
    signatures[{each["name"].Text(), ir::ReadDevice(each["device"])}] = each["parameters"].Each(parameter);
  }
  ir::WeightOffsets offsets;
  for (const Json& each : json["weights"].Each()) {
    const ir::Parameter read = parameter(each);
    offsets[{each["tensor"].Text(), read.layout, read.dtype, read.shape}] = each["offset_bytes"].Size();
  }
  const Plan bound = ir::Bind(graph, plan, signatures, offsets);
  std::string text;
  for (const Step& step : bound.steps) text += Text(bound, step);
  for (const Upload& upload : bound.uploads) {
    text += " upload " + std::to_string(upload.offset_bytes) + " to " + std::to_string(upload.arena_offset_bytes) + ";";
  }
  return text;
}

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << Answer(Json::Parse("line", line)) << std::endl;
    } catch (const Refusal& refusal) {
      const std::string text = refusal.what();
      const size_t inner = text.find("(HC");
      std::cout << (inner == std::string::npos ? text.substr(6, 5) : text.substr(inner + 1, 5)) << std::endl;
    }
  }
}
