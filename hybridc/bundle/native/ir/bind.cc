#include "ir/bind.h"

#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <tuple>

#include "refusal.h"

namespace hybridc::ir {
namespace {

constexpr int64_t kFaultRowBytes = 2 * sizeof(int64_t);

[[noreturn]] void RefuseBinding(const std::string& what, const std::string& where) {
  throw Refusal("HC306", "its plan does not fit its functions: " + what + " (" + where + ")", "",
                "compile the model again");
}

int64_t Align(int64_t size_bytes) { return (size_bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes; }

std::string DeviceName(Device device) { return device == Device::kGpu ? "gpu" : "cpu"; }

Space SpaceOf(Device device) { return device == Device::kGpu ? Space::kGpu : Space::kCpu; }

WeightKey KeyOf(const std::string& tensor, const Parameter& parameter) {
  return {tensor, parameter.layout, parameter.dtype, parameter.shape};
}

// Which steps record an event, and which events each step waits for. A wait is dropped where the same lane already
// waited for that step or for a later one of its lane.
void SetEvents(const Plan& plan, std::vector<hybridc::Step>* bound) {
  std::array<std::array<int64_t, kLanes>, kLanes> reached;  // by lanes that wait, and that are waited for
  for (auto& each : reached) each.fill(-1);
  std::vector<std::vector<int64_t>> waits;
  std::vector<bool> is_recorded(plan.steps.size());
  for (const Step& step : plan.steps) {
    std::array<int64_t, kLanes>& own = reached[step.lane()];
    std::array<int64_t, kLanes> latest = own;
    for (int64_t wait : step.waits) {
      const size_t lane = plan.steps[wait].lane();
      if (lane != step.lane()) latest[lane] = std::max(latest[lane], wait);
    }
    std::vector<int64_t>& needed = waits.emplace_back();
    for (size_t lane = 0; lane < kLanes; ++lane) {
      if (latest[lane] == own[lane]) continue;
      needed.push_back(latest[lane]);
      is_recorded[latest[lane]] = true;
    }
    own = latest;
  }
  std::vector<int64_t> events(plan.steps.size(), -1);
  int64_t count = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    if (is_recorded[i]) events[i] = count++;
  }
  for (size_t i = 0; i < events.size(); ++i) {
    (*bound)[i].event = events[i];
    for (int64_t wait : waits[i]) (*bound)[i].waits.push_back(events[wait]);
  }
}

class Binder {
 public:
  Binder(const Graph& graph, const Plan& plan, const Signatures& signatures, const WeightOffsets& weights)
      : graph_(graph), plan_(plan), signatures_(signatures), weights_(weights) {
    for (const Tensor& tensor : graph.tensors) tensors_[tensor.name] = &tensor;
    int64_t row = 0;
    for (const Kernel& kernel : graph.kernels) {
      for (const std::string& name : kernel.outputs) producer_[name] = &kernel;
      kernels_[kernel.name] = &kernel;
      first_row_[kernel.name] = row;
      row += static_cast<int64_t>(kernel.checks.size());
    }
    for (const Buffer& buffer : plan.buffers) {
      stays_[{buffer.name, buffer.device, buffer.kind == BufferKind::kWorkspace}].push_back(&buffer);
    }
    for (auto& [held, buffers] : stays_) {
      std::stable_sort(buffers.begin(), buffers.end(),
                       [](const Buffer* one, const Buffer* other) { return one->first_step < other->first_step; });
    }
    FindGpuWeights();
  }

  hybridc::Plan Bound() {
    hybridc::Plan bound{};
    bound.gpu_bytes = plan_.ArenaBytes(Device::kGpu);
    bound.host_bytes = plan_.ArenaBytes(Device::kCpu);
    bound.promised_bytes = plan_.budget_bytes.value_or(bound.gpu_bytes);
    bound.predicted_us = plan_.makespan_us;
    for (size_t i = 0; i < plan_.steps.size(); ++i) {
      const Step& step = plan_.steps[i];
      const int64_t position = static_cast<int64_t>(i);
      hybridc::Step& made = bound.steps.emplace_back();
      made.name = step.name;
      made.planned_us = step.us;
      made.lane = static_cast<int64_t>(step.lane());
      if (step.is_copy) {
        made.operands = Copied(position, step);
      } else {
        made.function = kernels_.at(step.name)->function + "_" + DeviceName(step.target);
        made.operands = Called(position, step);
      }
      made.guards = Guards(position, step);
    }
    SetEvents(plan_, &bound.steps);
    bound.uploads = Uploads();
    bound.inputs = Inputs();
    bound.outputs = Outputs();
    bound.checks = Checks();
    bound.operands = std::move(operands_);
    return bound;
  }

 private:
  using Held = std::tuple<std::string, Device, bool>;

  bool IsWeight(const std::string& name) const { return tensors_.at(name)->role == Role::kWeight; }

  // The one layout that each weight has in the GPU's arena, and on the way there.
  void FindGpuWeights() {
    for (const Step& step : plan_.steps) {
      if (step.is_copy || step.target != Device::kGpu) continue;
      const Kernel& kernel = *kernels_.at(step.name);
      const std::vector<Parameter>& parameters = ParametersOf(step);
      for (size_t i = 0; i < kernel.inputs.size(); ++i) {
        const std::string& name = kernel.inputs[i];
        if (!IsWeight(name)) continue;
        if (parameters[i].size_bytes != tensors_.at(name)->size_bytes) {
          RefuseBinding("GPU kernels read " + std::to_string(parameters[i].size_bytes) + " bytes of it, " +
                            std::to_string(tensors_.at(name)->size_bytes) + " are planned",
                        name);
        }
        const auto [chosen, is_first] = gpu_weights_.emplace(name, &parameters[i]);
        if (chosen->second->layout != parameters[i].layout) {
          RefuseBinding("GPU kernels want one weight packed in two ways", name);
        }
      }
    }
  }

  // Of the function that a step calls.
  const std::vector<Parameter>& ParametersOf(const Step& step) const {
    const Kernel& kernel = *kernels_.at(step.name);
    const size_t named = kernel.inputs.size() + kernel.outputs.size(), checks = kernel.checks.size();
    const auto found = signatures_.find({kernel.function, step.target});
    if (found == signatures_.end()) {
      RefuseBinding("there is no " + kernel.function + "_" + DeviceName(step.target), kernel.name);
    }
    const std::vector<Parameter>& parameters = found->second;
    if (parameters.size() < named + (checks > 0)) {
      RefuseBinding(kernel.function + " has " + std::to_string(parameters.size()) + " parameters, its kernel " +
                        std::to_string(named) + " tensors",
                    kernel.name);
    }
    const std::vector<int64_t> rows = {static_cast<int64_t>(checks), 2};
    if (checks > 0 && (parameters.back().shape != rows || parameters.back().dtype != "int64")) {
      RefuseBinding(kernel.function + " has no place for " + std::to_string(checks) + " faults", kernel.name);
    }
    return parameters;
  }

  // Arguments of a function: inputs, outputs, workspaces, faults.
  std::vector<size_t> Called(int64_t position, const Step& step) {
    const Kernel& kernel = *kernels_.at(step.name);
    const std::vector<Parameter>& parameters = ParametersOf(step);
    std::vector<std::string> named = kernel.inputs;
    named.insert(named.end(), kernel.outputs.begin(), kernel.outputs.end());
    std::vector<size_t> numbers;
    for (size_t i = 0; i < named.size(); ++i) {
      if (step.target == Device::kCpu && IsWeight(named[i])) {
        numbers.push_back(InWeights(named[i], parameters[i]));
      } else {
        numbers.push_back(InBuffer(Stay(position, named[i], step.target, false), 0, parameters[i]));
      }
    }
    const size_t end = parameters.size() - (kernel.checks.empty() ? 0 : 1);
    int64_t offset = 0;
    for (size_t i = named.size(); i < end; ++i) {
      numbers.push_back(InBuffer(Stay(position, kernel.name, step.target, true), offset, parameters[i]));
      offset += Align(parameters[i].size_bytes);
    }
    if (!kernel.checks.empty()) {
      const bool on_gpu = step.target == Device::kGpu;
      numbers.push_back(Number({Space::kFaults, on_gpu, first_row_.at(kernel.name) * kFaultRowBytes,
                                parameters.back().shape, "int64"}));
    }
    return numbers;
  }

  // Source and target of a copy, of one size.
  std::vector<size_t> Copied(int64_t position, const Step& step) {
    const Tensor& tensor = *tensors_.at(step.name);
    const Parameter bytes{"uint8", {tensor.size_bytes}, 0, tensor.size_bytes};
    const size_t target = InBuffer(Stay(position, step.name, step.target, false), 0, bytes);
    if (!IsWeight(step.name)) {
      return {InBuffer(Stay(position, step.name, step.source, false), 0, bytes), target};
    }
    const auto weight = gpu_weights_.find(step.name);
    if (weight == gpu_weights_.end()) RefuseBinding("no GPU kernel reads it", step.name);
    return {InWeights(step.name, *weight->second), target};
  }

  // Where the conditions of a step are, and what they must be: those of its kernel, of a copy those of the kernel that
  // computes the tensor.
  std::vector<hybridc::Guard> Guards(int64_t position, const Step& step) {
    std::vector<Guard> guards;
    if (!step.is_copy) {
      const Kernel& kernel = *kernels_.at(step.name);
      guards = kernel.guards;
      if (step.target == Device::kCpu) AddInPlace(position, kernel, &guards);
    } else if (const auto producer = producer_.find(step.name); producer != producer_.end()) {
      guards = producer->second->guards;
    }
    std::vector<hybridc::Guard> made;
    for (const Guard& guard : guards) {
      const Parameter condition{"bool", {1}, 0, 1};
      made.push_back({InBuffer(Stay(position, guard.tensor, Device::kCpu, false), 0, condition), guard.value});
    }
    return made;
  }

  // Of a choice whose result has the bytes of an operand: where it takes that, it has nothing to do.
  void AddInPlace(int64_t position, const Kernel& kernel, std::vector<Guard>* guards) const {
    if (kernel.choice.empty()) return;
    for (const std::string& name : kernel.choice) {
      if (IsWeight(name)) return;
    }
    if (IsWeight(kernel.outputs[0])) return;
    const int64_t place = Stay(position, kernel.outputs[0], Device::kCpu, false).offset_bytes;
    for (size_t side : {1, 2}) {
      if (Stay(position, kernel.choice[side], Device::kCpu, false).offset_bytes == place) {
        guards->push_back({kernel.choice[0], side == 2});
      }
    }
  }

  // The buffer that holds a tensor on a device at a step: of its stays the one begun last.
  const Buffer& Stay(int64_t position, const std::string& name, Device device, bool is_workspace) const {
    const auto found = stays_.find({name, device, is_workspace});
    if (found != stays_.end()) {
      for (auto buffer = found->second.rbegin(); buffer != found->second.rend(); ++buffer) {
        if ((*buffer)->first_step <= position && position <= (*buffer)->last_step) return **buffer;
      }
    }
    RefuseBinding("step " + std::to_string(position) + " finds no " + (is_workspace ? "workspace" : "space") +
                      " on the " + DeviceName(device),
                  name);
  }

  size_t InBuffer(const Buffer& buffer, int64_t offset, const Parameter& parameter) {
    if (offset > buffer.size_bytes || parameter.size_bytes > buffer.size_bytes - offset) {
      RefuseBinding("an array of " + std::to_string(parameter.size_bytes) + " bytes at " + std::to_string(offset) +
                        " does not fit the " + std::to_string(buffer.size_bytes) + " bytes planned",
                    buffer.name + " on the " + DeviceName(buffer.device));
    }
    return Number({SpaceOf(buffer.device), buffer.device == Device::kGpu, buffer.offset_bytes + offset,
                   parameter.shape, parameter.dtype});
  }

  size_t InWeights(const std::string& name, const Parameter& parameter) {
    return Number({Space::kWeights, false, OffsetOf(name, parameter), parameter.shape, parameter.dtype});
  }

  int64_t OffsetOf(const std::string& name, const Parameter& parameter) const {
    const auto found = weights_.find(KeyOf(name, parameter));
    if (found == weights_.end()) RefuseBinding("it is not stored as it is read", "weight " + name);
    return found->second;
  }

  using Array = std::tuple<Space, bool, int64_t, std::vector<int64_t>, std::string>;

  // Arrays that several steps touch are one operand.
  size_t Number(const Array& array) {
    const auto [found, is_new] = numbers_.emplace(array, operands_.size());
    if (is_new) {
      const auto& [space, on_gpu, offset_bytes, shape, dtype] = array;
      operands_.push_back({space, on_gpu, offset_bytes, shape, tvm::ffi::StringToDLDataType(dtype)});
    }
    return found->second;
  }

  std::vector<Upload> Uploads() const {
    std::vector<Upload> uploads;
    for (const Buffer& buffer : plan_.buffers) {
      if (buffer.device != Device::kGpu || buffer.kind != BufferKind::kWeight || buffer.first_step >= 0) continue;
      const Parameter& weight = *gpu_weights_.at(buffer.name);
      uploads.push_back({OffsetOf(buffer.name, weight), buffer.offset_bytes, weight.size_bytes});
    }
    return uploads;
  }

  // The place of a tensor in an arena before the first step, or after the last.
  Place InArena(const std::string& name, bool is_before) const {
    for (Device device : {Device::kCpu, Device::kGpu}) {
      const auto found = stays_.find({name, device, false});
      if (found == stays_.end()) continue;
      for (const Buffer* buffer : found->second) {
        const bool is_there = is_before ? buffer->first_step < 0
                                        : buffer->last_step >= static_cast<int64_t>(plan_.steps.size());
        if (is_there && buffer->kind == BufferKind::kTensor) return {SpaceOf(device), buffer->offset_bytes};
      }
    }
    return {};
  }

  std::vector<PortTensor> Inputs() const {
    std::vector<PortTensor> inputs;
    for (const std::string& name : graph_.inputs) inputs.push_back({InArena(name, true)});
    return inputs;
  }

  // An output may be an input, whose place may be taken by then, or a weight.
  std::vector<PortTensor> Outputs() const {
    std::vector<PortTensor> outputs;
    for (const std::string& name : graph_.outputs) {
      const auto input = std::find(graph_.inputs.begin(), graph_.inputs.end(), name);
      const Tensor& tensor = *tensors_.at(name);
      if (input != graph_.inputs.end()) {
        outputs.push_back({{Space::kInputs, input - graph_.inputs.begin()}});
      } else if (IsWeight(name)) {
        const int64_t offset = OffsetOf(name, {tensor.dtype, tensor.shape, 0, tensor.size_bytes});
        outputs.push_back({{Space::kWeights, offset}});
      } else {
        outputs.push_back({InArena(name, false)});
      }
    }
    return outputs;
  }

  std::vector<ValueCheck> Checks() const {
    std::vector<ValueCheck> checks;
    for (const Kernel& kernel : graph_.kernels) {
      for (const Check& check : kernel.checks) {
        ValueCheck& made =
            checks.emplace_back(ValueCheck{check.node, check.op, check.kind, check.lower, check.upper, {}});
        const auto input = std::find(graph_.inputs.begin(), graph_.inputs.end(), check.tensor);
        if (input != graph_.inputs.end()) made.input = static_cast<size_t>(input - graph_.inputs.begin());
      }
    }
    return checks;
  }

  const Graph& graph_;
  const Plan& plan_;
  const Signatures& signatures_;
  const WeightOffsets& weights_;
  std::map<std::string, const Tensor*> tensors_;
  std::map<std::string, const Kernel*> kernels_;
  std::map<std::string, const Kernel*> producer_;
  std::map<std::string, int64_t> first_row_;  // of its checks, in the array of faults
  std::map<Held, std::vector<const Buffer*>> stays_;
  std::map<std::string, const Parameter*> gpu_weights_;
  std::map<Array, size_t> numbers_;
  std::vector<Operand> operands_;
};

}  // namespace

hybridc::Plan Bind(const Graph& graph, const Plan& plan, const Signatures& signatures, const WeightOffsets& weights) {
  return Binder(graph, plan, signatures, weights).Bound();
}

}  // namespace hybridc::ir
