#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "ir/plan.h"

namespace hybridc::ir {
namespace {

constexpr int64_t kLargest = int64_t{1} << 48;
constexpr size_t kLargestRank = 32;

std::vector<std::string> ReadNames(const Json& json) {
  return json.Each([](const Json& name) { return name.Text(); });
}

template <typename Value, size_t kCount>
Value ReadOneOf(const Json& json, const std::pair<const char*, Value> (&known)[kCount]) {
  const std::string name = json.Text();
  for (const auto& [each, value] : known) {
    if (name == each) return value;
  }
  json.Refuse("it is none of those that there are");
}

Role ReadRole(const Json& json) {
  return ReadOneOf<Role>(json, {{"input", Role::kInput},
                                {"weight", Role::kWeight},
                                {"activation", Role::kActivation},
                                {"state", Role::kState},
                                {"output", Role::kOutput}});
}

BufferKind ReadKind(const Json& json) {
  return ReadOneOf<BufferKind>(json, {{"tensor", BufferKind::kTensor},
                                      {"weight", BufferKind::kWeight},
                                      {"workspace", BufferKind::kWorkspace}});
}

// A number that may be wrong, and be added to others.
int64_t ReadWhole(const Json& json) { return json.Whole(-kLargest, kLargest); }

double ReadUs(const Json& json) {
  const double us = json.Number();
  if (!(us >= 0 && us <= 1e18)) json.Refuse("it is no time");
  return us;
}

Tensor ReadTensor(const Json& json) {
  Tensor tensor{json["name"].Text(), json["dtype"].Text(), ReadExtents(json["shape"]), ReadRole(json["role"]), 0};
  tensor.size_bytes = ReadBits(json["dtype"]) / 8;
  for (int64_t extent : tensor.shape) tensor.size_bytes *= extent;  // `ReadExtents` has checked the product
  if (tensor.size_bytes > kLargest) json.Refuse("it is more than any memory holds");
  return tensor;
}

Check ReadKernelCheck(const Json& json) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  return {json["node"].Text(),
          json["operator"].Text(),
          ReadOneOf<CheckKind>(json["kind"], {{"index", CheckKind::kIndex},
                                              {"divisor", CheckKind::kDivisor},
                                              {"trips", CheckKind::kTrips}}),
          json["lower"].Whole(kLeast, kMost),
          json["upper"].Whole(kLeast, kMost),
          json.Has("tensor") ? json["tensor"].Text() : ""};
}

std::array<std::string, 2> ReadPair(const Json& json) {
  const std::vector<std::string> names = ReadNames(json);
  if (names.size() != 2) json.Refuse("it is no pair");
  return {names[0], names[1]};
}

Kernel ReadKernel(const Json& json) {
  Kernel kernel{json["name"].Text(), json["function"].Text(), ReadNames(json["inputs"]), ReadNames(json["outputs"])};
  kernel.may_overwrite = json["may_overwrite"].Each(ReadPair);
  kernel.workspace_bytes = {json["gpu_workspace_bytes"].Size(), json["cpu_workspace_bytes"].Size()};
  for (const Json& device : json["devices"].Each()) kernel.has_code[static_cast<size_t>(ReadDevice(device))] = true;
  if (json.Has("checks")) kernel.checks = json["checks"].Each(ReadKernelCheck);
  if (json.Has("choice")) kernel.choice = ReadNames(json["choice"]);
  if (json.Has("guards")) {
    kernel.guards =
        json["guards"].Each([](const Json& guard) { return Guard{guard["tensor"].Text(), guard["value"].Flag()}; });
  }
  return kernel;
}

Step ReadStep(const Json& json) {
  const std::vector<int64_t> waits = json["waits"].Each(ReadWhole);
  const double us = ReadUs(json["us"]);
  if (!json.Has("run")) {
    const Device source = ReadDevice(json["source"]), target = ReadDevice(json["target"]);
    return {true, json["copy"].Text(), source, target, waits, us};
  }
  const Device device = ReadDevice(json["device"]);
  return {false, json["run"].Text(), device, device, waits, us};
}

Buffer ReadBuffer(const Json& json) {
  return {json["tensor"].Text(),           ReadKind(json["kind"]),         ReadDevice(json["device"]),
          ReadWhole(json["offset_bytes"]), ReadWhole(json["size_bytes"]),  ReadWhole(json["first_step"]),
          ReadWhole(json["last_step"])};
}

Arena ReadArena(const Json& json) { return {ReadDevice(json["device"]), ReadWhole(json["size_bytes"])}; }

}  // namespace

std::vector<std::vector<size_t>> Graph::Ports(const std::vector<std::string>& names) const {
  std::map<std::string, std::string> second;
  std::set<std::string> behind;
  for (const auto& [first, other] : parts) {
    second[first] = other;
    behind.insert(other);
  }
  std::vector<std::vector<size_t>> ports;
  for (size_t i = 0; i < names.size(); ++i) {
    if (behind.contains(names[i])) continue;
    std::vector<size_t>& positions = ports.emplace_back(1, i);
    const auto other = second.find(names[i]);
    if (other == second.end()) continue;
    const auto found = std::find(names.begin(), names.end(), other->second);
    if (found != names.end()) positions.push_back(static_cast<size_t>(found - names.begin()));
  }
  return ports;
}

int64_t Plan::ArenaBytes(Device device) const {
  for (const Arena& arena : arenas) {
    if (arena.device == device) return arena.size_bytes;
  }
  return 0;
}

int64_t ReadBits(const Json& dtype) {
  return ReadOneOf<int64_t>(dtype, {{"bool", 8},
                                    {"float16", 16},
                                    {"bfloat16", 16},
                                    {"float32", 32},
                                    {"float64", 64},
                                    {"int8", 8},
                                    {"int16", 16},
                                    {"int32", 32},
                                    {"int64", 64},
                                    {"uint8", 8},
                                    {"uint16", 16},
                                    {"uint32", 32},
                                    {"uint64", 64}});
}

std::vector<int64_t> ReadExtents(const Json& json) {
  std::vector<int64_t> extents = json.Each([](const Json& extent) { return extent.Size(); });
  int64_t product = 1;
  for (int64_t extent : extents) {
    if (extent == 0) continue;
    if (__builtin_mul_overflow(product, extent, &product) || product > kLargest) product = kLargest + 1;
  }
  if (extents.size() > kLargestRank || product > kLargest) json.Refuse("it is more than any memory holds");
  return extents;
}

Device ReadDevice(const Json& json) {
  return ReadOneOf<Device>(json, {{"gpu", Device::kGpu}, {"cpu", Device::kCpu}});
}

Graph ReadGraph(const Json& json) {
  Graph graph{json["tensors"].Each(ReadTensor), json["kernels"].Each(ReadKernel), ReadNames(json["inputs"]),
              ReadNames(json["outputs"])};
  if (json.Has("carried")) graph.carried = json["carried"].Each(ReadPair);
  if (json.Has("parts")) graph.parts = json["parts"].Each(ReadPair);
  return graph;
}

Plan ReadPlan(const Json& json) {
  Plan plan{json["steps"].Each(ReadStep), json["buffers"].Each(ReadBuffer), json["arenas"].Each(ReadArena)};
  if (!json["budget_bytes"].IsNull()) plan.budget_bytes = json["budget_bytes"].Whole(0, kLargest);
  plan.makespan_us = ReadUs(json["makespan_us"]);
  plan.time_bound_us = ReadUs(json["time_bound_us"]);
  return plan;
}

}  // namespace hybridc::ir
