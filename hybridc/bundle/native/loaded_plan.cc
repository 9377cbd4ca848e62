#include "loaded_plan.h"

#include <sys/mman.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "feeds.h"
#include "gpu.h"
#include "refusal.h"
#include "system/host.h"
#include "system/staging.h"

namespace hybridc {
namespace {

constexpr DLDataType kByte{kDLUInt, 8, 1};

// Bytes that somebody else frees, as a tensor.
struct ForeignMemory {
  void* data;
  void AllocData(DLTensor* tensor) { tensor->data = data; }
  void FreeData(DLTensor*) {}
};

ffi::Tensor BytesAt(void* data, int64_t size_bytes) {
  return ffi::Tensor::FromNDAlloc(ForeignMemory{data}, ffi::Shape({size_bytes}), kByte, DLDevice{kDLCPU, 0});
}

std::string Described(const Step& step) {
  return (step.function.has_value() ? "kernel " : "the copy of tensor ") + Quoted(step.name);
}

}  // namespace

// The system would set memory aside for all pages, and refuse a file larger than that, but for NORESERVE.
Mapping::Mapping(const File& file) : size_bytes_(file.size_bytes()) {
  if (size_bytes_ == 0) return;
  void* pages = mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.handle(), 0);
  if (pages == MAP_FAILED) {
    throw Refusal("HC412", std::string("the weights cannot be mapped: ") + std::strerror(errno), file.path(),
                  "close other programs, or raise the limit (ulimit -v)");
  }
  data_ = static_cast<char*>(pages);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

Lanes::Lanes(const Library& library, bool cuda, int threads)
    : library_(library), handle_(library.Help<int64_t>("open_lanes", cuda, kGpuIndex, threads)) {}

Lanes::~Lanes() { library_.Help("close_lanes", handle_); }

LoadedPlan::LoadedPlan(const Program& program, const Plan& plan, const Library& library, const File& weights,
                       const std::string& folder, int threads, int64_t host_limit_bytes)
    : plan_(plan), library_(library), folder_(folder), mapping_(weights) {
  if (NeedsGpu()) CheckGpu(program, folder);
  weights_ = BytesAt(mapping_.data(), mapped_bytes());
  const std::vector<Streamed> streamed = Guarded(folder_, [&] { return StreamedWeights(); });
  std::vector<int64_t> sizes;
  for (const Streamed& weight : streamed) sizes.push_back(weight.size_bytes);
  const Staging staging = ChooseStaging(sizes, plan_.host_bytes, host_limit_bytes, AvailableHostBytes());
  CheckRoom(plan_.host_bytes + staging.size_bytes, HostRoomBytes());
  if (NeedsGpu()) AllocateOnGpu();
  Guarded(folder_, [&] {
    Prepare(threads);
    Stage(streamed, staging);
    AddSteps();
  });
}

std::vector<LoadedPlan::Streamed> LoadedPlan::StreamedWeights() {
  std::vector<Streamed> streamed;
  for (const Step& step : plan_.steps) {
    if (step.function.has_value()) continue;
    const Operand& source = plan_.operands[step.operands[0]];
    if (source.space != Space::kWeights || !staged_.emplace(step.operands[0], 0).second) continue;
    const ffi::Tensor view = View(weights_, source.offset_bytes, source.shape, source.dtype);  // which checks it
    streamed.push_back({step.operands[0], static_cast<int64_t>(ffi::GetDataSize(view.numel(), view.dtype()))});
  }
  return streamed;
}

void LoadedPlan::AllocateOnGpu() {
  const int64_t free_bytes = FreeGpuBytes(library_);
  try {
    gpu_arena_ = library_.Help<ffi::Tensor>("device_arena", kGpuIndex, plan_.gpu_bytes);
  } catch (const ffi::Error&) {
    throw Refusal("HC405",
                  "the bundle needs " + std::to_string(plan_.gpu_bytes) + " bytes of GPU memory, but " +
                      std::to_string(free_bytes) + " are free",
                  folder_, "stop other programs on the GPU, or compile with a smaller --gpu-memory");
  }
}

void LoadedPlan::Prepare(int threads) {
  host_arena_ = HostArena(std::max<int64_t>(plan_.host_bytes, 1), NeedsGpu(), "the arena on the host");
  for (const Upload& upload : plan_.uploads) {
    const std::string place = std::to_string(upload.offset_bytes);
    const std::string where = "weights at byte " + place + ", which are copied to the GPU once";
    Guarded(
        folder_,
        [&] {
          library_.Help("upload", BytesOf(weights_, upload.offset_bytes, upload.size_bytes),
                        BytesOf(gpu_arena_, upload.arena_offset_bytes, upload.size_bytes));
        },
        where);
  }
  Guarded(folder_, [&] { lanes_ = std::make_unique<Lanes>(library_, NeedsGpu(), threads); },
          "the streams of a plan's lanes");
  run_ = library_.Function("hybridc_run");
  if (!plan_.checks.empty()) {
    faults_ = HostArena(static_cast<int64_t>(plan_.checks.size() * sizeof(Fault)), NeedsGpu(),
                        "the array of what kernels find wrong with values");
    ClearFaults();
    library_.Help("set_faults", lanes_->handle(), faults_);
  }
}

void LoadedPlan::Stage(const std::vector<Streamed>& streamed, const Staging& staging) {
  if (streamed.empty()) return;
  pinned_ = HostArena(staging.size_bytes, true, "the staging of streamed weights");
  slot_count_ = staging.slot_count;
  if (slot_count_ != 0) {
    library_.Help("set_slots", lanes_->handle(), pinned_, slot_count_);
    return;
  }
  int64_t offset = 0;
  for (const Streamed& weight : streamed) {
    const char* const source = mapping_.data() + plan_.operands[weight.operand].offset_bytes;
    void* const target = BytesOf(pinned_, offset, weight.size_bytes).data_ptr();  // which checks that there is room
    std::memcpy(target, source, static_cast<size_t>(weight.size_bytes));
    staged_[weight.operand] = offset;
    offset += Aligned(weight.size_bytes);
  }
}

void LoadedPlan::AddSteps() {
  const auto add = [this](const Step& step) {
    AddStep(step);
    if (!step.guards.empty()) GuardStep(step);
  };
  for (const Step& step : plan_.steps) Guarded(folder_, [&] { add(step); }, Described(step));
}

void LoadedPlan::GuardStep(const Step& step) {
  ffi::Array<ffi::Tensor> conditions;
  std::vector<int64_t> values;
  for (const Guard& guard : step.guards) {
    conditions.push_back(ArrayOf(guard.operand, false));
    values.push_back(guard.value);
  }
  library_.Help("guard_step", lanes_->handle(), step.lane, conditions, ffi::Shape(values.begin(), values.end()));
}

void LoadedPlan::AddStep(const Step& step) {
  const int64_t lanes = lanes_->handle();
  const ffi::Shape waits(step.waits.begin(), step.waits.end());
  if (step.function.has_value()) {
    ffi::Array<ffi::Tensor> arrays;
    for (size_t number : step.operands) arrays.push_back(ArrayOf(number, false));
    library_.Help("add_call", lanes, step.lane, waits, library_.Function(*step.function), arrays, step.event);
    return;
  }
  const bool is_streamed = staged_.contains(step.operands[0]);
  const ffi::Tensor source = ArrayOf(step.operands[0], is_streamed), target = ArrayOf(step.operands[1], false);
  if (is_streamed) {
    library_.Help("add_stream", lanes, waits, source, target, step.event);
  } else {
    library_.Help("add_copy", lanes, step.lane, waits, source, target, step.event);
  }
}

ffi::Tensor LoadedPlan::HostArena(int64_t size_bytes, bool pinned, const char* where) const {
  return Guarded(folder_, [&] { return library_.Help<ffi::Tensor>("host_arena", size_bytes, pinned); }, where);
}

ffi::Tensor LoadedPlan::ArrayOf(size_t number, bool is_streamed) {
  const Operand& operand = plan_.operands[number];
  const bool is_staged = is_streamed && slot_count_ == 0;
  if (is_staged) return View(pinned_, staged_.at(number), operand.shape, operand.dtype);
  ffi::Tensor& array = arrays_[number];
  if (array.defined()) return array;
  switch (operand.space) {
    case Space::kGpu:
      array = View(gpu_arena_, operand.offset_bytes, operand.shape, operand.dtype);
      break;
    case Space::kCpu:
      array = View(host_arena_, operand.offset_bytes, operand.shape, operand.dtype);
      break;
    case Space::kWeights:
      array = View(weights_, operand.offset_bytes, operand.shape, operand.dtype);
      break;
    default:  // faults
      if (operand.on_gpu) {
        array = library_.Help<ffi::Tensor>("pinned_view", kGpuIndex, faults_, operand.offset_bytes,
                                           ffi::Shape(operand.shape.begin(), operand.shape.end()), operand.dtype);
      } else {
        array = View(faults_, operand.offset_bytes, operand.shape, operand.dtype);
      }
  }
  return array;
}

ffi::Tensor LoadedPlan::View(const ffi::Tensor& arena, int64_t offset, const std::vector<int64_t>& shape,
                             DLDataType dtype) const {
  return library_.Help<ffi::Tensor>("arena_view", arena, offset, ffi::Shape(shape.begin(), shape.end()), dtype);
}

ffi::Tensor LoadedPlan::BytesOf(const ffi::Tensor& arena, int64_t offset, int64_t size_bytes) const {
  return View(arena, offset, {size_bytes}, kByte);
}

void LoadedPlan::ClearFaults() {
  if (faults_.defined()) std::memset(faults_.data_ptr(), 0, plan_.checks.size() * sizeof(Fault));
}

void LoadedPlan::Run() {
  int64_t row = -1;
  try {
    row = run_(lanes_->handle()).cast<int64_t>();
  } catch (const ffi::Error& error) {
    ClearFaults();
    Rethrow(error, folder_, FailedStep());
  } catch (...) {
    ClearFaults();
    throw;
  }
  if (row < 0) return;
  const int64_t value = static_cast<const Fault*>(faults_.data_ptr())[row].value;
  ClearFaults();
  RefuseValue(plan_.checks[static_cast<size_t>(row)], value);
}

std::string LoadedPlan::FailedStep() const {
  const auto failed = library_.Help<ffi::Array<int64_t>>("failed_step", lanes_->handle());
  int64_t left = failed[1];
  for (const Step& step : plan_.steps) {
    if (step.lane == failed[0] && left-- == 0) return Described(step);
  }
  return "";
}

std::vector<std::pair<double, double>> LoadedPlan::Measure() {
  constexpr int64_t kLanes = 4;
  library_.Help("start_tracing", lanes_->handle());
  Run();
  std::vector<ffi::Array<double>> marks(kLanes);  // begin and end of each step of a lane, in turns
  std::vector<std::pair<double, double>> spans;
  std::vector<int64_t> used(kLanes, 0);
  Guarded(folder_, [&] {
    for (const Step& step : plan_.steps) {
      ffi::Array<double>& own = marks[step.lane];
      if (own.empty()) own = library_.Help<ffi::Array<double>>("trace", lanes_->handle(), step.lane);
      spans.emplace_back(own[used[step.lane]], own[used[step.lane] + 1]);
      used[step.lane] += 2;
    }
  });
  return spans;
}

char* LoadedPlan::HostBytes(const Place& place) const {
  if (place.space == Space::kWeights) return mapping_.data() + place.offset;
  return place.space == Space::kCpu ? static_cast<char*>(host_arena_.data_ptr()) + place.offset : nullptr;
}

void LoadedPlan::PutOnGpu(int64_t offset, const void* data, int64_t size_bytes) const {
  Guarded(folder_, [&] {
    library_.Help("upload", BytesAt(const_cast<void*>(data), size_bytes), BytesOf(gpu_arena_, offset, size_bytes));
  });
}

void LoadedPlan::GetFromGpu(int64_t offset, void* data, int64_t size_bytes) const {
  Guarded(folder_,
          [&] { library_.Help("upload", BytesOf(gpu_arena_, offset, size_bytes), BytesAt(data, size_bytes)); });
}

}  // namespace hybridc
