// The lanes of a run: one host thread each, which issues the lane's steps in order. Those of the GPU and of
// copies put them on CUDA streams; the CPU's runs its kernels itself, on the thread that asks for the run and its
// workers; that of the network makes blocking calls.
// Steps are added once, in the order of the plan; what they are told is checked here, whoever tells it.
#pragma once
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "arrays.h"
#include "cuda_runtime.h"
#include "graphs.h"
#include "threads.h"
#include "trace.h"
#include "workers.h"

namespace hybridc {

enum LaneNumber : int64_t { kGpu, kCpu, kHostToDevice, kDeviceToHost, kNet, kLaneCount };  // as ir/plan.py has them
constexpr LaneNumber kStreamLanes[] = {kGpu, kHostToDevice, kDeviceToHost};

// Waiting for an event means first to wait, on the host, until its lane has recorded it in this run: CUDA
// takes a wait for an event that is not recorded yet for one that is over. The host alone knows of events of
// the lanes of the CPU and the network, whose steps have ended when they are recorded.
class Lanes {
 public:
  Lanes(bool cuda, int device, int thread_count)
      : cuda_(cuda), device_(device), workers_(std::make_shared<Workers>(thread_count)) {
    Check(0 < thread_count, "a run needs a thread");
  }

  // Run kernels on the workers of other lanes instead of more threads: no two of these lanes may run at once.
  void ShareWorkers(const Lanes& others) { workers_ = others.workers_; }

  // Whether this is a process that was forked since, in which there are neither threads nor a GPU.
  bool IsForked() const { return (cuda_ || !threads_.empty()) && process_ != getpid(); }

  // Without CUDA there are the lanes of the CPU and the network only. Streams are not ordered by the null stream.
  void Open() {
    if (!cuda_) return;
    HYBRIDC_CUDA(set_device, device_);
    for (int64_t lane : kStreamLanes) HYBRIDC_CUDA(stream_create, &streams_[lane], kStreamNonBlocking);
    for (int64_t lane : kStreamLanes) threads_.emplace_back([this, lane] { Serve(lane); });
  }

  ~Lanes() {
    is_closing_ = true;
    StartRun();
    for (std::thread& thread : threads_) thread.join();
    if (!cuda_) return;
    segments_.clear();
    const CudaRuntime& runtime = CudaRuntime::Get();
    for (const Event& event : events_) Destroy(runtime.event_destroy, event.cuda);
    for (const Slot& slot : slots_) Destroy(runtime.event_destroy, slot.is_free);
    Destroy(runtime.event_destroy, trace_base_);
    for (CudaStream stream : streams_) Destroy(runtime.stream_destroy, stream);
  }

  // A step of a lane waits for events, calls a function with arrays of its device, or copies, and records an
  // event (-1: none). Only events of steps that were added before can be waited for, so no lanes wait for one
  // another in a circle; and the event of a step is the next number.
  void AddCall(int64_t lane, ffi::Shape waits, ffi::Function function, ffi::Array<ffi::Tensor> arrays,
               int64_t event) {
    const DLDeviceType device = lane == kGpu ? kDLCUDA : kDLCPU;
    Check(lane == kGpu || IsHosts(lane), "functions are called on the lanes of kernels and the network alone");
    Check(function.defined(), "there is no function");
    for (const ffi::Tensor& array : arrays) CheckDevice(array, device);
    Step& step = AddStep(lane, waits, event);
    step.function = function;
    step.arrays = {arrays.begin(), arrays.end()};
    step.arguments = {step.arrays.begin(), step.arrays.end()};
    if (lane == kNet && steps_[kNet].size() == 1) threads_.emplace_back([this] { Serve(kNet); });
  }

  void AddCopy(int64_t lane, ffi::Shape waits, ffi::Tensor source, ffi::Tensor target, int64_t event) {
    Check(lane == kHostToDevice || lane == kDeviceToHost, "copies have lanes of their own");
    CheckDevice(source, lane == kDeviceToHost ? kDLCUDA : kDLCPU);
    CheckDevice(target, lane == kHostToDevice ? kDLCUDA : kDLCPU);
    CheckSameSize(source, target);
    AddStep(lane, waits, event).arrays = {source, target};
  }

  // A weight, to the GPU; by way of the slots if there are any.
  void AddStream(ffi::Shape waits, ffi::Tensor source, ffi::Tensor target, int64_t event) {
    AddCopy(kHostToDevice, waits, source, target, event);
    steps_[kHostToDevice].back().is_streamed = true;
  }

  // The step of a lane that was added last is executed only if each condition, one bool in the host's memory, has its
  // value. They are looked at in order once the events that the step waits for have been recorded; a condition is
  // written by the CPU's lane, whose steps have ended by then. A step that is not executed still records its event.
  void GuardStep(int64_t lane, ffi::Array<ffi::Tensor> conditions, ffi::Shape values) {
    CheckLane(lane);
    Check(!steps_[lane].empty() && conditions.size() == values.size(), "there is no step, or no value for a condition");
    Step& step = steps_[lane].back();
    for (size_t i = 0; i < conditions.size(); ++i) {
      const ffi::Tensor condition = conditions[i];
      CheckDevice(condition, kDLCPU);
      Check(SizeBytes(condition) == 1, "a condition has one byte");
      step.guards.push_back({condition, values[i] != 0});
    }
  }

  // Runs every lane's steps, and returns when all of them have ended: nothing writes into the arenas any
  // more, also after a failure. Of several failures the first is thrown; then the next run starts afresh.
  // Returns the row of the first check that failed in a kernel, or -1.
  int64_t Run() {
    RunSteps();
    for (size_t row = 0; row < faults_.size(); ++row) {
      if (faults_[row].failed != 0) return static_cast<int64_t>(row);
    }
    return -1;
  }

  // Lane, and position in it, of the step that failed first in the last run: position -1 where the lane's stream did
  // when it was waited for, and lane -1 where no lane did.
  ffi::Array<int64_t> FailedStep() const { return {failed_lane_, failed_step_}; }

  // Host memory, which may be pinned, that kernels write into when a check fails: a row for each check.
  void SetFaults(ffi::Tensor faults) {
    CheckDevice(faults, kDLCPU);
    Check(SizeBytes(faults) % sizeof(Fault) == 0, "a fault has two numbers");
    fault_memory_ = faults;
    faults_ = {reinterpret_cast<const Fault*>(Bytes(faults)), SizeBytes(faults) / sizeof(Fault)};
  }

  // Notes when steps begin and end, in all runs from now on.
  void StartTracing() { is_traced_ = true; }

  // Begin and end of each step of a lane in the last run, in turns, in microseconds since its start.
  ffi::Array<double> TraceOf(int64_t lane) const {
    CheckLane(lane);
    const std::vector<double> times = traces_[lane].Microseconds(trace_base_, trace_start_);
    return ffi::Array<double>(times.begin(), times.end());
  }

  // Slots of pinned memory, one behind the other, that streamed weights go through on their way to the GPU.
  void SetSlots(ffi::Tensor pinned, int64_t count) {
    CheckDevice(pinned, kDLCPU);
    Check(slots_.empty() && 0 < count && count <= SizeBytes(pinned), "there cannot be so many slots");
    pinned_ = pinned;
    slot_bytes_ = SizeBytes(pinned) / count;
    for (int64_t i = 0; i < count; ++i) {
      Slot& slot = slots_.emplace_back();
      slot.bytes = Bytes(pinned) + i * slot_bytes_;
      HYBRIDC_CUDA(event_create, &slot.is_free, kEventDisableTiming | kEventBlockingSync);
    }
  }

 private:
  enum EventState : int { kPending, kRecorded, kEnded };

  struct Event {
    CudaEvent cuda = nullptr;
    std::atomic<int> state = kPending;
  };

  struct Slot {
    char* bytes;
    CudaEvent is_free = nullptr;
  };

  struct Fault {
    int64_t failed, value;
  };

  // The GPU's steps from `first` to `last`, as one launch.
  struct Segment {
    size_t first, last;
    KernelGraph graph;
  };

  struct Guard {
    ffi::Tensor condition;
    bool value;
  };

  struct Step {
    std::vector<int64_t> waits;
    std::vector<Guard> guards;
    ffi::Optional<ffi::Function> function;  // none: a copy
    std::vector<ffi::Tensor> arrays;        // what the function is called with; source and target of a copy
    std::vector<ffi::AnyView> arguments;    // the same, as they are passed
    bool is_streamed = false;
    int64_t event = -1;
  };

  // Whether the lane's steps are done by the host's thread that issues them.
  static bool IsHosts(int64_t lane) { return lane == kCpu || lane == kNet; }

  static void Destroy(int (*destroy)(void*), void* handle) {
    if (handle != nullptr) destroy(handle);
  }

  void CheckLane(int64_t lane) const {
    Check(0 <= lane && lane < kLaneCount && (cuda_ || IsHosts(lane)), "there is no such lane");
  }

  Step& AddStep(int64_t lane, ffi::Shape waits, int64_t event) {
    CheckLane(lane);
    const int64_t event_count = static_cast<int64_t>(events_.size());
    for (int64_t wait : waits) Check(0 <= wait && wait < event_count, "no step before records this event");
    Check(event == -1 || event == event_count, "events are numbered in the order of their steps");
    Step& step = steps_[lane].emplace_back();
    step.waits = {waits.begin(), waits.end()};
    step.event = event;
    if (event == -1) return step;
    Event& recorded = events_.emplace_back();
    if (cuda_) HYBRIDC_CUDA(event_create, &recorded.cuda, kEventDisableTiming);
    return step;
  }

  void Issue(int64_t lane, int64_t position) {
    const Step& step = steps_[lane][position];
    issued_[lane] = position;
    for (int64_t wait : step.waits) Wait(lane, wait);
    if (is_traced_) traces_[lane].Mark(streams_[lane]);
    if (IsNeeded(step)) Execute(lane, step);
    if (is_traced_) traces_[lane].Mark(streams_[lane]);
    if (step.event != -1) Record(lane, step.event);
  }

  static bool IsNeeded(const Step& step) {
    return std::all_of(step.guards.begin(), step.guards.end(), [](const Guard& guard) {
      return (*Bytes(guard.condition) != 0) == guard.value;
    });
  }

  void Execute(int64_t lane, const Step& step) {
    if (step.function.has_value()) {
      Call(step);
    } else if (step.is_streamed) {
      Stream(Bytes(step.arrays[1]), Bytes(step.arrays[0]), SizeBytes(step.arrays[1]));
    } else {
      Copy(lane, Bytes(step.arrays[1]), Bytes(step.arrays[0]), SizeBytes(step.arrays[1]));
    }
  }

  static void Call(const Step& step) {
    ffi::Any nothing;
    step.function.value().CallPacked(step.arguments.data(), static_cast<int32_t>(step.arguments.size()), &nothing);
  }

  // Kernels between which the GPU's lane neither waits nor records an event are one launch from the second run on,
  // as the first run loads their code. Those with guards are launched one by one: the first run may have left them
  // out, and each run decides anew.
  void Capture() {
    if (std::exchange(is_captured_, true)) return;
    const std::vector<Step>& steps = steps_[kGpu];
    for (size_t first = 0, last; first < steps.size(); first = last + 1) {
      last = first;
      while (last + 1 < steps.size() && IsOneLaunch(steps[last], steps[last + 1])) ++last;
      if (first == last) continue;
      KernelGraph graph = KernelGraph::Capture(device_, streams_[kGpu], [&] {
        for (size_t i = first; i <= last; ++i) Call(steps[i]);
      });
      if (graph.is_empty()) return;
      segments_.push_back({first, last, std::move(graph)});
    }
  }

  static bool IsOneLaunch(const Step& step, const Step& next) {
    return step.event == -1 && next.waits.empty() && step.guards.empty() && next.guards.empty();
  }

  void IssueGpu() {
    const std::vector<Step>& steps = steps_[kGpu];
    auto segment = segments_.begin();
    for (size_t i = 0; i < steps.size(); ++i) {
      if (segment == segments_.end() || segment->first != i) {
        Issue(kGpu, i);
        continue;
      }
      issued_[kGpu] = i;
      for (int64_t wait : steps[i].waits) Wait(kGpu, wait);
      segment->graph.Launch(streams_[kGpu]);
      i = segment++->last;
      if (steps[i].event != -1) Record(kGpu, steps[i].event);
    }
  }

  void Copy(int64_t lane, void* target, const void* source, size_t size_bytes) {
    HYBRIDC_CUDA(memcpy_async, target, source, size_bytes, kMemcpyDefault, streams_[lane]);
  }

  void Record(int64_t lane, int64_t event_index) {
    Event& event = events_[event_index];
    if (!IsHosts(lane)) HYBRIDC_CUDA(event_record, event.cuda, streams_[lane]);
    event.state = IsHosts(lane) ? kEnded : kRecorded;
    event.state.notify_all();
    if (has_failed_) Stop();
  }

  void Wait(int64_t lane, int64_t event_index) {
    Event& event = events_[event_index];
    event.state.wait(kPending);
    if (has_failed_) Stop();
    if (event.state == kEnded) return;
    if (IsHosts(lane)) {
      HYBRIDC_CUDA(event_synchronize, event.cuda);
    } else {
      HYBRIDC_CUDA(stream_wait_event, streams_[lane], event.cuda, 0);
    }
  }

  // A weight from pinned memory is copied from there. With slots it may lie in a mapped file: this lane's
  // thread reads it into a slot while the slots before are still being copied.
  void Stream(char* target, const char* source, size_t size_bytes) {
    if (slots_.empty()) return Copy(kHostToDevice, target, source, size_bytes);
    for (size_t begin = 0; begin < size_bytes; begin += slot_bytes_) {
      const size_t part_bytes = std::min(slot_bytes_, size_bytes - begin);
      Slot& slot = slots_[next_slot_++ % slots_.size()];
      HYBRIDC_CUDA(event_synchronize, slot.is_free);  // at once if it was never recorded
      std::memcpy(slot.bytes, source + begin, part_bytes);
      Copy(kHostToDevice, target + begin, slot.bytes, part_bytes);
      HYBRIDC_CUDA(event_record, slot.is_free, streams_[kHostToDevice]);
    }
  }

  void Serve(int64_t lane) {
    LeaveSignals();
    AskForShortSlice();
    for (uint32_t run = 0;; ++run) {
      run_.wait(run);
      if (is_closing_) return;
      RunLane(lane);
      if (--running_ == 0) running_.notify_all();
    }
  }

  void BeginTrace() {
    for (Trace& trace : traces_) trace.Clear();
    if (cuda_) {
      if (trace_base_ == nullptr) HYBRIDC_CUDA(event_create, &trace_base_, kEventDefault);
      HYBRIDC_CUDA(event_record, trace_base_, streams_[kGpu]);
      HYBRIDC_CUDA(event_synchronize, trace_base_);
    }
    trace_start_ = Trace::Clock::now();
  }

  void RunSteps() {
    Check(!IsForked(), "lanes on a GPU do not outlive a fork");
    failed_lane_ = failed_step_ = -1;
    const Workers::Use use(workers_.get());
    if (is_traced_) BeginTrace();
    if (threads_.empty()) return IssueAll(kCpu);
    for (Event& event : events_) event.state = kPending;
    has_failed_ = false;
    issued_.fill(-1);
    running_ = static_cast<int>(threads_.size());
    StartRun();
    RunLane(kCpu);
    for (int left; (left = running_) != 0;) running_.wait(left);
    // here and not on the lanes' threads, which would spin on cores that CPU kernels need
    if (cuda_) {
      for (int64_t lane : kStreamLanes) Try(lane, [&] { HYBRIDC_CUDA(stream_synchronize, streams_[lane]); });
    }
    if (has_failed_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (cuda_ && !is_traced_) Capture();
  }

  void StartRun() {
    ++run_;
    run_.notify_all();
  }

  void RunLane(int64_t lane) {
    Try(lane, [&] {
      if (cuda_) HYBRIDC_CUDA(set_device, device_);
      if (lane == kGpu) TVMFFIEnvSetStream(kDLCUDA, device_, streams_[kGpu], nullptr);
      IssueAll(lane);
      issued_[lane] = -1;
    });
  }

  void IssueAll(int64_t lane) {
    if (lane == kGpu && !is_traced_) return IssueGpu();
    for (size_t i = 0; i < steps_[lane].size(); ++i) Issue(lane, i);
  }

  template <typename Action>
  void Try(int64_t lane, Action action) {
    try {
      action();
    } catch (...) {
      Fail(lane, std::current_exception());
    }
  }

  // The first failure is what the caller gets; lanes that wait are woken, and stop.
  void Fail(int64_t lane, std::exception_ptr failure) {
    {
      std::lock_guard<std::mutex> lock(failure_mutex_);
      if (has_failed_) return;
      failure_ = failure;
      failed_lane_ = lane;
      failed_step_ = issued_[lane];
      has_failed_ = true;
    }
    for (Event& event : events_) {
      int pending = kPending;
      event.state.compare_exchange_strong(pending, kEnded);
      event.state.notify_all();
    }
  }

  [[noreturn]] static void Stop() { TVM_FFI_THROW(RuntimeError) << "another lane has failed"; }

  const bool cuda_;
  const int device_;
  const pid_t process_ = getpid();
  std::shared_ptr<Workers> workers_;
  CudaStream streams_[kLaneCount] = {};  // the lanes of the CPU and the network have none
  std::deque<Event> events_;  // which never moves them
  std::array<std::vector<Step>, kLaneCount> steps_;
  std::array<int64_t, kLaneCount> issued_ = {};  // the position that each lane is at; -1 before and behind them all
  int64_t failed_lane_ = -1, failed_step_ = -1;
  std::vector<Segment> segments_;
  bool is_captured_ = false;
  ffi::Optional<ffi::Tensor> pinned_;
  std::vector<Slot> slots_;
  ffi::Optional<ffi::Tensor> fault_memory_;
  std::span<const Fault> faults_;
  size_t slot_bytes_ = 0, next_slot_ = 0;
  std::array<Trace, kLaneCount> traces_;
  CudaEvent trace_base_ = nullptr;
  Trace::Clock::time_point trace_start_;
  bool is_traced_ = false;
  std::vector<std::thread> threads_;
  std::atomic<uint32_t> run_ = 0;  // counts them
  std::atomic<int> running_ = 0;   // lanes with a thread that have not ended
  std::atomic<bool> is_closing_ = false, has_failed_ = false;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

}  // namespace hybridc
