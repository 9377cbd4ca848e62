#include "ir/verify.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <unordered_map>

#include "refusal.h"

namespace hybridc::ir {
namespace {

constexpr double kRounding = 1e-9;       // of sums of times
constexpr double kBoundRounding = 1e-5;  // the exact solver counts time in whole units

// Per lane the last position that has ended: what happens before something, as a vector clock.
using Clock = std::array<int64_t, kLanes>;
constexpr Clock kNothing = {-1, -1, -1, -1};

// Numbers by names.
using Index = std::unordered_map<std::string, size_t>;

[[noreturn]] void RefusePlan(const char* code, const std::string& what, const std::string& where) {
  throw Refusal("HC306", std::string("its plan is rejected (") + code + "): " + what, where,
                "corrupted plan, or a hybridc bug: compile the model again");
}

const char* NameOf(Device device) { return device == Device::kGpu ? "gpu" : "cpu"; }

std::string Described(const Step& step, int64_t position) {
  const std::string text = "step " + std::to_string(position) + ": ";
  if (!step.is_copy) return text + "run " + Quoted(step.name) + " on the " + NameOf(step.target);
  return text + "copy " + Quoted(step.name) + " from " + NameOf(step.source) + " to " + NameOf(step.target);
}

std::string Described(const Buffer& buffer) {
  const char* const kinds[] = {"tensor", "weight", "workspace"};
  return std::string(kinds[static_cast<size_t>(buffer.kind)]) + " buffer of " + Quoted(buffer.name) + " on the " +
         NameOf(buffer.device);
}

template <typename Named>
Index IndexOf(const std::vector<Named>& all) {
  Index index;
  for (const Named& each : all) {
    if (!index.emplace(each.name, index.size()).second) {
      RefusePlan("HC210", "the name " + Quoted(each.name) + " stands for two things", "the graph");
    }
  }
  return index;
}

bool Covers(const Clock& clock, const Clock& uses) {
  return std::equal(clock.begin(), clock.end(), uses.begin(), std::greater_equal<int64_t>());
}

// Which buffer had each byte of an arena last.
class Ledger {
 public:
  // Lets a buffer have the bytes from `start` up to `end`; returns those that had any of them.
  std::set<size_t> Take(int64_t start, int64_t end, size_t buffer) {
    std::set<size_t> owners;
    if (start == end) return owners;
    auto range = ranges_.upper_bound(start);
    if (range != ranges_.begin()) --range;
    while (range != ranges_.end() && range->first < end) {
      const auto [low, held] = *range;
      if (held.end <= start) {
        ++range;
        continue;
      }
      owners.insert(held.owner);
      range = ranges_.erase(range);
      if (low < start) ranges_[low] = {start, held.owner};
      if (held.end > end) ranges_[end] = held;
    }
    ranges_[start] = {end, buffer};
    return owners;
  }

 private:
  struct Range {
    int64_t end;
    size_t owner;
  };
  std::map<int64_t, Range> ranges_;  // disjoint, by their starts
};

class Verifier {
 public:
  Verifier(const Graph& graph, const Plan& plan)
      : graph_(graph), plan_(plan), end_(static_cast<int64_t>(plan.steps.size())) {}

  void Check() {
    CheckGraph();
    CheckSteps();
    CheckArenas();
    FindClocks();
    FindRoles();
    for (const Buffer& buffer : plan_.buffers) CheckBuffer(buffer);
    last_use_.assign(plan_.buffers.size(), kNothing);
    CheckAllAccesses();
    for (const Buffer& buffer : plan_.buffers) CheckIsWritten(buffer);
    CheckInterface();
    CheckOverlaps();
    CheckTimes();
  }

 private:
  // A tensor on a device, or a kernel's workspace.
  using Held = std::array<size_t, 3>;

  const Tensor& TensorOf(const std::string& name) const { return graph_.tensors[tensors_.at(name)]; }
  const Kernel& KernelOf(const std::string& name) const { return graph_.kernels[kernels_.at(name)]; }
  bool IsWeight(const std::string& name) const { return TensorOf(name).role == Role::kWeight; }
  bool IsProduced(const std::string& name) const { return producer_.contains(name); }
  bool IsGiven(const std::string& name) const { return !IsProduced(name) && !IsWeight(name); }

  Held HeldBy(const Buffer& buffer) const {
    const bool is_workspace = buffer.kind == BufferKind::kWorkspace;
    return HeldAs(buffer.name, buffer.device, is_workspace);
  }

  Held HeldAs(const std::string& name, Device device, bool is_workspace) const {
    return {static_cast<size_t>(device), is_workspace, (is_workspace ? kernels_ : tensors_).at(name)};
  }

  // Names are unique and known, every tensor has one writer at most.
  void CheckGraph() {
    tensors_ = IndexOf(graph_.tensors);
    kernels_ = IndexOf(graph_.kernels);
    for (const Kernel& kernel : graph_.kernels) {
      for (const std::string& name : kernel.outputs) {
        if (!producer_.emplace(name, kernels_.at(kernel.name)).second) {
          RefusePlan("HC210", "two kernels write " + Quoted(name), "the graph");
        }
      }
    }
    for (const Kernel& kernel : graph_.kernels) {
      CheckKnown(kernel.inputs);
      for (const Guard& guard : kernel.guards) CheckKnown({guard.tensor});
      CheckKnown(kernel.choice);
      CheckKnown(kernel.outputs);
    }
    CheckKnown(graph_.inputs);
    CheckKnown(graph_.outputs);
    CheckCarried();
    CheckParts();
    CheckGuards();
  }

  // Each pair is an input that is no output, and an output of its type that a kernel writes; no tensor is in two pairs.
  void CheckCarried() const {
    const auto is_in = [](const std::vector<std::string>& names, const std::string& name) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    std::set<std::string> seen;
    for (const auto& pair : graph_.carried) {
      for (const std::string& name : pair) {
        if (!seen.insert(name).second) RefusePlan("HC210", "a tensor is in two loop-carried pairs", "the graph");
      }
    }
    for (const auto& [old, made] : graph_.carried) {
      const bool is_known = tensors_.contains(old) && tensors_.contains(made) && is_in(graph_.inputs, old) &&
                            !is_in(graph_.outputs, old) && is_in(graph_.outputs, made);
      if (!is_known || IsProduced(old) || !IsProduced(made) || TensorOf(old).shape != TensorOf(made).shape ||
          TensorOf(old).dtype != TensorOf(made).dtype) {
        RefusePlan("HC210", Quoted(made) + " and " + Quoted(old) + " cannot be a loop-carried pair", "the graph");
      }
    }
  }

  // Both parts are inputs, or outputs, of one type, each once, the second ones behind all others.
  void CheckParts() const {
    std::set<std::string> seen, second;
    for (const auto& pair : graph_.parts) {
      for (const std::string& name : pair) {
        if (!seen.insert(name).second) RefusePlan("HC210", "a tensor is in two pairs of parts", "the graph");
      }
      second.insert(pair[1]);
    }
    for (const auto& [first, other] : graph_.parts) {
      const bool is_input = ArePartsOf(graph_.inputs, first, other);
      const bool is_known = is_input != ArePartsOf(graph_.outputs, first, other);
      const bool is_behind = IsBehind(graph_.inputs, other, second) || IsBehind(graph_.outputs, other, second);
      if (!is_known || !is_behind || TensorOf(first).dtype != TensorOf(other).dtype) {
        RefusePlan("HC210", Quoted(first) + " and " + Quoted(other) + " cannot be parts", "the graph");
      }
    }
  }

  static bool ArePartsOf(const std::vector<std::string>& ports, const std::string& first, const std::string& other) {
    return std::count(ports.begin(), ports.end(), first) == 1 && std::count(ports.begin(), ports.end(), other) == 1;
  }

  // Whether a name is among the last ports, as many as are second parts.
  static bool IsBehind(const std::vector<std::string>& ports, const std::string& name,
                       const std::set<std::string>& second) {
    const std::set<std::string> distinct(ports.begin(), ports.end());
    const auto is_second = [&second](const std::string& port) { return second.contains(port); };
    const auto count = std::count_if(distinct.begin(), distinct.end(), is_second);
    return std::find(ports.end() - count, ports.end(), name) != ports.end();
  }

  // Whatever is read has been computed then: its kernel has guards of the reader, and no others. A choice reads each of
  // two operands under one guard more. Outputs, and states, are always computed.
  void CheckGuards() const {
    for (const Kernel& kernel : graph_.kernels) {
      const std::string where = "kernel " + Quoted(kernel.name);
      std::vector<Guard> known;
      for (const Guard& guard : kernel.guards) {
        CheckCondition(guard.tensor, where);
        CheckComputed(guard.tensor, known, where);
        known.push_back(guard);
      }
      CheckReads(kernel, where);
    }
    for (const std::string& name : graph_.outputs) CheckComputed(name, {}, "the graph's results");
    for (const Tensor& tensor : graph_.tensors) {
      if (tensor.role == Role::kState) CheckComputed(tensor.name, {}, "the graph's results");
    }
  }

  void CheckReads(const Kernel& kernel, const std::string& where) const {
    if (kernel.choice.empty()) {
      for (const std::string& name : kernel.inputs) CheckComputed(name, kernel.guards, where);
      return;
    }
    const std::set<std::string> chosen(kernel.choice.begin(), kernel.choice.end());
    const std::set<std::string> read(kernel.inputs.begin(), kernel.inputs.end());
    if (kernel.choice.size() != 3 || chosen != read || kernel.outputs.size() != 1) {
      RefusePlan("HC210", "is a choice of what it does not read", where);
    }
    const std::string& condition = kernel.choice[0];
    CheckCondition(condition, where);
    CheckComputed(condition, kernel.guards, where);
    for (size_t side : {1, 2}) {
      std::vector<Guard> known = kernel.guards;
      known.push_back({condition, side == 1});
      CheckComputed(kernel.choice[side], known, where);
    }
  }

  void CheckCondition(const std::string& name, const std::string& where) const {
    const Tensor& tensor = TensorOf(name);
    if (tensor.dtype != "bool" || tensor.size_bytes != 1) {
      RefusePlan("HC224", "its condition " + Quoted(name) + " is not one bool", where);
    }
  }

  void CheckComputed(const std::string& name, const std::vector<Guard>& known, const std::string& where) const {
    for (const Guard& guard : GuardsOf(name)) {
      if (std::find(known.begin(), known.end(), guard) != known.end()) continue;
      RefusePlan("HC224",
                 "reads " + Quoted(name) + ", which is computed only if " + Quoted(guard.tensor) + " is " +
                     (guard.value ? "True" : "False"),
                 where);
    }
  }

  // Of the kernel that computes a tensor.
  const std::vector<Guard>& GuardsOf(const std::string& name) const {
    static const std::vector<Guard> none;
    const auto producer = producer_.find(name);
    return producer == producer_.end() ? none : graph_.kernels[producer->second].guards;
  }

  void CheckKnown(const std::vector<std::string>& names) const {
    for (const std::string& name : names) {
      if (!tensors_.contains(name)) RefusePlan("HC210", "unknown tensor " + Quoted(name), "the graph");
    }
  }

  // Names, devices and waits; and that every kernel runs.
  void CheckSteps() {
    for (int64_t position = 0; position < end_; ++position) {
      const Step& step = plan_.steps[position];
      const std::string where = Described(step, position);
      for (int64_t wait : step.waits) {
        if (wait < 0 || wait >= position) {
          RefusePlan("HC212", "waits for step " + std::to_string(wait) + ", which is not earlier", where);
        }
      }
      if (step.is_copy) {
        if (!tensors_.contains(step.name)) RefusePlan("HC210", "copies an unknown tensor", where);
        if (step.source == step.target) RefusePlan("HC210", "copies from a device to itself", where);
        continue;
      }
      if (!kernels_.contains(step.name)) RefusePlan("HC210", "runs an unknown kernel", where);
      if (!KernelOf(step.name).has_code[static_cast<size_t>(step.target)]) {
        RefusePlan("HC211", "the kernel has no code for the device", where);
      }
      runs_.insert({step.name, step.target});
    }
    for (const Kernel& kernel : graph_.kernels) {
      if (!runs_.contains({kernel.name, Device::kGpu}) && !runs_.contains({kernel.name, Device::kCpu})) {
        RefusePlan("HC211", "the kernel never runs", "kernel " + Quoted(kernel.name));
      }
    }
  }

  void CheckArenas() const {
    std::set<Device> devices;
    for (const Arena& arena : plan_.arenas) {
      if (!devices.insert(arena.device).second) RefusePlan("HC210", "a device has two arenas", "the arenas");
    }
    for (const Arena& arena : plan_.arenas) {
      const std::string where = std::string("arena of the ") + NameOf(arena.device);
      if (arena.size_bytes < 0) RefusePlan("HC210", "impossible size " + std::to_string(arena.size_bytes), where);
      if (arena.device == Device::kGpu && plan_.budget_bytes.has_value() && arena.size_bytes > *plan_.budget_bytes) {
        RefusePlan("HC217",
                   std::to_string(arena.size_bytes) + " bytes exceed the budget of " +
                       std::to_string(*plan_.budget_bytes) + " bytes",
                   where);
      }
    }
  }

  // What has ended when each step ends, itself included, and what when it begins.
  void FindClocks() {
    std::array<Clock, kLanes> lane_clock = {kNothing, kNothing, kNothing, kNothing};
    for (int64_t position = 0; position < end_; ++position) {
      const Step& step = plan_.steps[position];
      Clock clock = lane_clock[step.lane()];
      for (int64_t wait : step.waits) {
        for (size_t lane = 0; lane < kLanes; ++lane) clock[lane] = std::max(clock[lane], clocks_[wait][lane]);
      }
      clocks_at_begin_.push_back(clock);
      clock[step.lane()] = position;
      clocks_.push_back(clock);
      lane_clock[step.lane()] = clock;
    }
  }

  void FindRoles() {
    std::set<std::string> before_all;  // on the GPU
    for (const Buffer& buffer : plan_.buffers) {
      const bool is_on_gpu = buffer.device == Device::kGpu && buffer.kind == BufferKind::kTensor;
      if (is_on_gpu && buffer.first_step < 0) before_all.insert(buffer.name);
    }
    for (const auto& pair : graph_.carried) {
      if (!before_all.contains(pair[0])) continue;
      resident_.push_back(pair);
      elsewhere_.insert(pair.begin(), pair.end());
    }
    for (const Kernel& kernel : graph_.kernels) {
      for (const auto& [output, input] : kernel.may_overwrite) overwrites_.insert({kernel.name, output, input});
      if (!runs_.contains({kernel.name, Device::kGpu})) continue;
      for (const std::string& name : kernel.inputs) {
        if (IsWeight(name)) gpu_weights_.insert(name);
      }
    }
  }

  // The buffer holds something of the graph, of its size, in its arena, for a possible time.
  void CheckBuffer(const Buffer& buffer) const {
    const std::string where = Described(buffer);
    int64_t size_bytes = 0;
    if (buffer.kind == BufferKind::kWorkspace) {
      if (!runs_.contains({buffer.name, buffer.device})) RefusePlan("HC215", "no such kernel runs there", where);
      size_bytes = KernelOf(buffer.name).workspace_bytes[static_cast<size_t>(buffer.device)];
    } else {
      if (!tensors_.contains(buffer.name)) RefusePlan("HC210", "unknown tensor", where);
      size_bytes = TensorOf(buffer.name).size_bytes;
      if (IsWeight(buffer.name) != (buffer.kind == BufferKind::kWeight)) {
        RefusePlan("HC219", "weights, and only they, lie in weight buffers", where);
      }
    }
    if (buffer.size_bytes != size_bytes) {
      const std::string found = std::to_string(buffer.size_bytes);
      RefusePlan("HC215", "has " + found + " bytes but needs " + std::to_string(size_bytes), where);
    }
    if (buffer.offset_bytes % kAlignmentBytes != 0 || buffer.offset_bytes < 0) {
      RefusePlan("HC215", "offset " + std::to_string(buffer.offset_bytes) + " is not aligned", where);
    }
    if (buffer.end_bytes() > plan_.ArenaBytes(buffer.device)) {
      RefusePlan("HC215", "ends at " + std::to_string(buffer.end_bytes()) + ", outside the arena", where);
    }
    if (buffer.first_step < -1 || buffer.first_step > buffer.last_step || buffer.last_step > end_) {
      const std::string first = std::to_string(buffer.first_step);
      RefusePlan("HC210", "held from step " + first + " to " + std::to_string(buffer.last_step), where);
    }
    if (buffer.kind != BufferKind::kWeight) return;
    if (buffer.device != Device::kGpu || !gpu_weights_.contains(buffer.name)) {
      RefusePlan("HC219", "only weights of GPU kernels have buffers, on the GPU", where);
    }
    if (buffer.first_step == -1 && buffer.last_step != end_) {
      RefusePlan("HC219", "is not resident during the whole run", where);
    }
  }

  // Every access, step by step, with the buffers that are live meanwhile: linear in both.
  void CheckAllAccesses() {
    std::vector<std::vector<size_t>> begins(plan_.steps.size() + 1), ends(plan_.steps.size() + 1);
    for (size_t i = 0; i < plan_.buffers.size(); ++i) {
      begins[std::max<int64_t>(plan_.buffers[i].first_step, 0)].push_back(i);
      ends[std::max<int64_t>(plan_.buffers[i].last_step, 0)].push_back(i);
    }
    for (int64_t position = 0; position < end_; ++position) {
      for (size_t i : begins[position]) {
        if (plan_.buffers[i].last_step >= position) live_[HeldBy(plan_.buffers[i])].insert(i);
      }
      CheckAccesses(position);
      for (size_t i : ends[position]) live_[HeldBy(plan_.buffers[i])].erase(i);
    }
  }

  void CheckAccesses(int64_t position) {
    const Step& step = plan_.steps[position];
    for (const Guard& guard : step.is_copy ? GuardsOf(step.name) : KernelOf(step.name).guards) {
      LookAt(position, guard.tensor);
    }
    if (step.is_copy) {
      if (!IsWeight(step.name)) {
        Read(position, step.name, step.source);
      } else if (step.target != Device::kGpu) {
        RefusePlan("HC219", "copies a weight to the host, where it always is", Described(step, position));
      }
      return Write(position, step.name, step.target);
    }
    const Kernel& kernel = KernelOf(step.name);
    for (const std::string& name : kernel.inputs) {
      if (step.target == Device::kGpu || !IsWeight(name)) Read(position, name, step.target);
    }
    for (const std::string& name : kernel.outputs) Write(position, name, step.target);
    if (kernel.workspace_bytes[static_cast<size_t>(step.target)] != 0) {
      Use(position, Covering(position, kernel.name, step.target, true));
    }
  }

  void Read(int64_t position, const std::string& name, Device device) {
    const size_t index = Covering(position, name, device, false);
    const int64_t written = plan_.buffers[index].first_step;
    if (written >= 0 && !IsBefore(written, position)) {
      RefusePlan("HC213",
                 "reads " + Quoted(name) + " on the " + NameOf(device) + " without being behind step " +
                     std::to_string(written) + ", which puts it there",
                 Described(plan_.steps[position], position));
    }
    Use(position, index);
  }

  // A lane reads a condition when it comes to a step: by then a kernel on the CPU, which it waits for, has ended; of a
  // copy from the GPU only the GPU would know.
  void LookAt(int64_t position, const std::string& name) {
    Read(position, name, Device::kCpu);
    const int64_t written = plan_.buffers[Covering(position, name, Device::kCpu, false)].first_step;
    if (written >= 0 && written < end_ && plan_.steps[written].is_copy) {
      RefusePlan("HC224", "its condition " + Quoted(name) + " is not computed on the CPU",
                 Described(plan_.steps[position], position));
    }
  }

  // A live range begins with the step that writes it, and nothing else writes it.
  void Write(int64_t position, const std::string& name, Device device) {
    const size_t index = Covering(position, name, device, false);
    if (plan_.buffers[index].first_step != position) {
      RefusePlan("HC213", "writes " + Quoted(name) + " on the " + NameOf(device) + ", which is already there",
                 Described(plan_.steps[position], position));
    }
    Use(position, index);
  }

  // The one buffer that holds a tensor or workspace at the step being checked.
  size_t Covering(int64_t position, const std::string& name, Device device, bool is_workspace) const {
    const auto found = live_.find(HeldAs(name, device, is_workspace));
    const size_t count = found == live_.end() ? 0 : found->second.size();
    if (count != 1) {
      RefusePlan("HC214", std::to_string(count) + " buffers hold " + Quoted(name) + " on the " + NameOf(device),
                 Described(plan_.steps[position], position));
    }
    return *found->second.begin();
  }

  void Use(int64_t position, size_t buffer) { last_use_[buffer][plan_.steps[position].lane()] = position; }

  bool IsBefore(int64_t early, int64_t late) const {
    return early < late && clocks_[late][plan_.steps[early].lane()] >= early;
  }

  // What a buffer holds is put there by the step it begins with, or by the session before all.
  void CheckIsWritten(const Buffer& buffer) const {
    const bool is_given = buffer.device == Device::kCpu
                              ? buffer.kind != BufferKind::kWorkspace && IsGiven(buffer.name) && !IsResident(buffer.name)
                              : buffer.kind == BufferKind::kWeight ||
                                    (buffer.kind == BufferKind::kTensor && IsResident(buffer.name));
    if (buffer.first_step < 0 ? is_given : IsWrittenFirst(buffer)) return;
    const std::string first = std::to_string(buffer.first_step);
    RefusePlan("HC213", "nothing writes it at step " + first + ", its first", Described(buffer));
  }

  // Whether it is an input that lies on the GPU from run to run.
  bool IsResident(const std::string& name) const {
    return std::any_of(resident_.begin(), resident_.end(), [&](const auto& pair) { return pair[0] == name; });
  }

  // Both have one buffer, on the GPU and at one offset: from the begin, and to the end.
  void CheckResident(const std::string& old, const std::string& made) const {
    const auto only = [&](const std::string& name) -> const Buffer* {
      const Buffer* found = nullptr;
      for (const Buffer& buffer : plan_.buffers) {
        if (buffer.kind == BufferKind::kWorkspace || buffer.name != name) continue;
        if (found != nullptr) return nullptr;
        found = &buffer;
      }
      return found;
    };
    const std::string where = "tensors " + Quoted(old) + " and " + Quoted(made);
    const Buffer *const before = only(old), *const after = only(made);
    if (before == nullptr || after == nullptr || after->device != Device::kGpu) {
      RefusePlan("HC220", "have not one buffer each, on the GPU", where);
    }
    if (after->last_step != end_ || after->offset_bytes != before->offset_bytes) {
      RefusePlan("HC220", "are not at one place before and after a run", where);
    }
  }

  bool IsWrittenFirst(const Buffer& buffer) const {
    if (buffer.first_step >= end_) return false;
    const Step& step = plan_.steps[buffer.first_step];
    if (step.target != buffer.device) return false;
    if (step.is_copy || buffer.kind == BufferKind::kWorkspace) {
      return step.name == buffer.name && step.is_copy == (buffer.kind != BufferKind::kWorkspace);
    }
    const auto producer = producer_.find(buffer.name);
    return producer != producer_.end() && step.name == graph_.kernels[producer->second].name;
  }

  // Inputs and states are on the host before the first step, outputs and states after the last.
  void CheckInterface() const {
    for (const auto& [old, made] : resident_) CheckResident(old, made);
    std::map<std::string, int> at_begin, at_end;  // host buffers of each tensor
    for (const Buffer& buffer : plan_.buffers) {
      if (buffer.device != Device::kCpu || buffer.kind == BufferKind::kWorkspace) continue;
      at_begin[buffer.name] += buffer.first_step == -1;
      at_end[buffer.name] += buffer.last_step == end_;
    }
    std::set<std::string> kept(graph_.outputs.begin(), graph_.outputs.end());
    for (const Tensor& tensor : graph_.tensors) {
      if (tensor.role == Role::kState) kept.insert(tensor.name);
    }
    for (const Tensor& tensor : graph_.tensors) {
      if (tensor.role == Role::kWeight || elsewhere_.contains(tensor.name)) continue;
      const std::string where = "tensor " + Quoted(tensor.name);
      if (IsGiven(tensor.name) && at_begin[tensor.name] != 1) {
        RefusePlan("HC218", "the input has not one host buffer to begin with", where);
      }
      if (kept.contains(tensor.name) && at_end[tensor.name] != 1) {
        RefusePlan("HC218", "the output is not in one host buffer in the end", where);
      }
    }
  }

  // Of any two buffers with common bytes, all uses of one come before the first use of the other. Buffers take bytes in
  // the order of their first steps, and each is compared with those that had its bytes last.
  void CheckOverlaps() const {
    std::vector<size_t> order(plan_.buffers.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t one, size_t other) {
      return plan_.buffers[one].first_step < plan_.buffers[other].first_step;
    });
    std::array<Ledger, 2> ledgers;
    for (size_t late : order) {
      const Buffer& buffer = plan_.buffers[late];
      Ledger& ledger = ledgers[static_cast<size_t>(buffer.device)];
      for (size_t early : ledger.Take(buffer.offset_bytes, buffer.end_bytes(), late)) {
        if (!IsOver(early, late) && !Overwrites(late, early)) RefuseOverlap(plan_.buffers[early], buffer);
      }
    }
  }

  // Whether all uses of one buffer come before the write that the other begins with.
  bool IsOver(size_t early, size_t late) const {
    const int64_t first_step = plan_.buffers[late].first_step;
    if (plan_.buffers[early].last_step == end_ || first_step < 0) return false;
    return Covers(clocks_at_begin_[first_step], last_use_[early]);
  }

  // Whether `late` may take the bytes of `early`: an output those of an input of the same kernel. All other uses of the
  // input must have ended before the kernel, and both begin at one address.
  bool Overwrites(size_t late, size_t early) const {
    const Buffer &made = plan_.buffers[late], &old = plan_.buffers[early];
    if (made.kind != BufferKind::kTensor || old.kind != BufferKind::kTensor || old.last_step == end_) return false;
    if (made.first_step < 0 || made.first_step >= end_) return false;
    const Step& step = plan_.steps[made.first_step];
    const Clock& uses = last_use_[early];
    if (step.is_copy || std::find(uses.begin(), uses.end(), made.first_step) == uses.end()) return false;
    return overwrites_.contains({step.name, made.name, old.name}) && made.offset_bytes == old.offset_bytes &&
           made.size_bytes <= old.size_bytes && Covers(clocks_[made.first_step], uses);
  }

  [[noreturn]] void RefuseOverlap(const Buffer& early, const Buffer& late) const {
    const auto range = [](const Buffer& buffer) {
      return Quoted(buffer.name) + " at " + std::to_string(buffer.offset_bytes) + ".." +
             std::to_string(buffer.end_bytes());
    };
    const bool is_step = late.first_step >= 0 && late.first_step < end_;
    RefusePlan("HC216",
               range(early) + " and " + range(late) +
                   " share bytes, and neither ends before the other begins, on the " + NameOf(late.device),
               is_step ? Described(plan_.steps[late.first_step], late.first_step) : "before the first step");
  }

  // Each lane's steps follow one another and what they wait for, and the run takes as long as that says.
  void CheckTimes() const {
    std::vector<double> ends_us;
    std::array<double, kLanes> lane_end_us = {};
    double latest_us = 0;
    for (const Step& step : plan_.steps) {
      double begin_us = lane_end_us[step.lane()];
      for (int64_t wait : step.waits) begin_us = std::max(begin_us, ends_us[wait]);
      ends_us.push_back(begin_us + step.us);
      lane_end_us[step.lane()] = ends_us.back();
      latest_us = std::max(latest_us, ends_us.back());
    }
    const double makespan_us = plan_.makespan_us;
    if (std::abs(makespan_us - latest_us) > kRounding * std::max(makespan_us, latest_us)) {
      RefusePlan("HC221",
                 "is said to take " + std::to_string(makespan_us) + " us, but its steps end after " +
                     std::to_string(latest_us) + " us",
                 "the plan");
    }
    if (plan_.time_bound_us > makespan_us * (1 + kBoundRounding)) {
      RefusePlan("HC221",
                 "takes " + std::to_string(makespan_us) + " us, less than its bound of " +
                     std::to_string(plan_.time_bound_us) + " us",
                 "the plan");
    }
  }

  const Graph& graph_;
  const Plan& plan_;
  const int64_t end_;
  Index tensors_, kernels_, producer_;
  std::set<std::pair<std::string, Device>> runs_;
  std::set<std::string> gpu_weights_;
  std::vector<std::array<std::string, 2>> resident_;  // pairs that lie on the GPU from run to run
  std::set<std::string> elsewhere_;                   // the tensors of these
  std::set<std::array<std::string, 3>> overwrites_;
  std::vector<Clock> clocks_, clocks_at_begin_;
  std::map<Held, std::set<size_t>> live_;
  std::vector<Clock> last_use_;  // per buffer and lane the last step that uses it
};

}  // namespace

void Verify(const Graph& graph, const Plan& plan) { Verifier(graph, plan).Check(); }

}  // namespace hybridc::ir
