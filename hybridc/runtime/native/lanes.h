// The lanes of a run: one host thread each, which issues the lane's steps in order. Those of the GPU and of
// copies put them on CUDA streams; the CPU's runs its kernels itself, on the thread that asks for the run.
#pragma once
#include <pthread.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"
#include "trace.h"

namespace hybridc {

namespace ffi = tvm::ffi;

enum LaneNumber : int64_t { kGpu, kCpu, kHostToDevice, kDeviceToHost, kLaneCount };  // as ir/plan.py has them
constexpr LaneNumber kStreamLanes[] = {kGpu, kHostToDevice, kDeviceToHost};

// Waiting for an event means first to wait, on the host, until its lane has recorded it in this run: CUDA
// takes a wait for an event that is not recorded yet for one that is over. The host alone knows of events of
// the CPU's lane, whose steps have ended when they are recorded.
class Lanes {
 public:
  Lanes(bool cuda, int device) : cuda_(cuda), device_(device) {}

  // Without CUDA there is the CPU's lane only, and no events. Streams are not ordered by the null stream.
  void Open(int64_t event_count) {
    if (!cuda_) return;
    HYBRIDC_CUDA(set_device, device_);
    for (int64_t lane : kStreamLanes) HYBRIDC_CUDA(stream_create, &streams_[lane], kStreamNonBlocking);
    for (int64_t i = 0; i < event_count; ++i) {
      HYBRIDC_CUDA(event_create, &events_.emplace_back().cuda, kEventDisableTiming);
    }
    for (int64_t lane : kStreamLanes) threads_.emplace_back([this, lane] { Serve(lane); });
  }

  ~Lanes() {
    if (!cuda_) return;
    is_closing_ = true;
    StartRun();
    for (std::thread& thread : threads_) thread.join();
    const CudaRuntime& runtime = CudaRuntime::Get();
    for (const Event& event : events_) Destroy(runtime.event_destroy, event.cuda);
    for (const Slot& slot : slots_) Destroy(runtime.event_destroy, slot.is_free);
    Destroy(runtime.event_destroy, trace_base_);
    for (CudaStream stream : streams_) Destroy(runtime.stream_destroy, stream);
  }

  void SetSteps(int64_t lane, ffi::Function steps, ffi::Array<ffi::Any> arguments) {
    steps_.at(lane) = {steps, arguments};
  }

  // Runs every lane's steps, and returns when all of them have ended: nothing writes into the arenas any
  // more, also after a failure. Of several failures the first is thrown; then the next run starts afresh.
  void Run() {
    if (is_traced_) BeginTrace();
    if (!cuda_) return Call(kCpu);
    for (Event& event : events_) event.state = kPending;
    has_failed_ = false;
    running_ = static_cast<int>(threads_.size());
    StartRun();
    RunLane(kCpu);
    for (int left; (left = running_) != 0;) running_.wait(left);
    // here and not on the lanes' threads, which would spin on cores that CPU kernels need
    for (int64_t lane : kStreamLanes) Try([&] { HYBRIDC_CUDA(stream_synchronize, streams_[lane]); });
    if (has_failed_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  // What a lane's VM calls before and after each call, to trace all runs from now on.
  ffi::Function Instrument(int64_t lane) {
    is_traced_ = true;
    return ffi::Function::FromPacked([this, lane](ffi::PackedArgs args, ffi::Any* result) {
      if (Trace::IsStep(args[1].cast<std::string>())) traces_[lane].Mark(streams_[lane]);
      *result = 0;  // go on
    });
  }

  // Begin and end of each step of a lane in the last run, in turns, in microseconds since its start.
  ffi::Array<double> TraceOf(int64_t lane) const {
    const std::vector<double> times = traces_.at(lane).Microseconds(trace_base_, trace_start_);
    return ffi::Array<double>(times.begin(), times.end());
  }

  void Copy(int64_t lane, void* target, const void* source, size_t size_bytes) {
    HYBRIDC_CUDA(memcpy_async, target, source, size_bytes, kMemcpyDefault, streams_[lane]);
  }

  void Record(int64_t lane, int64_t event_index) {
    Event& event = events_.at(event_index);
    if (lane != kCpu) HYBRIDC_CUDA(event_record, event.cuda, streams_[lane]);
    event.state = lane == kCpu ? kEnded : kRecorded;
    event.state.notify_all();
    if (has_failed_) Stop();
  }

  void Wait(int64_t lane, int64_t event_index) {
    Event& event = events_.at(event_index);
    event.state.wait(kPending);
    if (has_failed_) Stop();
    if (event.state == kEnded) return;
    if (lane == kCpu) {
      HYBRIDC_CUDA(event_synchronize, event.cuda);
    } else {
      HYBRIDC_CUDA(stream_wait_event, streams_[lane], event.cuda, 0);
    }
  }

  // Slots of pinned memory, one behind the other, that streamed weights go through on their way to the GPU.
  void SetSlots(char* bytes, int64_t count, int64_t slot_bytes) {
    slot_bytes_ = slot_bytes;
    for (int64_t i = 0; i < count; ++i) {
      Slot& slot = slots_.emplace_back();
      slot.bytes = bytes + i * slot_bytes;
      HYBRIDC_CUDA(event_create, &slot.is_free, kEventDisableTiming | kEventBlockingSync);
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

  struct Steps {
    ffi::Optional<ffi::Function> function;
    ffi::Array<ffi::Any> arguments;
  };

  static void Destroy(int (*destroy)(void*), void* handle) {
    if (handle != nullptr) destroy(handle);
  }

  void Serve(int64_t lane) {
    LeaveSignals();
    for (uint32_t run = 0;; ++run) {
      run_.wait(run);
      if (is_closing_) return;
      RunLane(lane);
      if (--running_ == 0) running_.notify_all();
    }
  }

  // Signals are for the program's own threads, but for faults.
  static void LeaveSignals() {
    sigset_t every;
    sigfillset(&every);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&every, fault);
    pthread_sigmask(SIG_SETMASK, &every, nullptr);
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

  void StartRun() {
    ++run_;
    run_.notify_all();
  }

  void RunLane(int64_t lane) {
    Try([&] {
      HYBRIDC_CUDA(set_device, device_);
      if (lane == kGpu) TVMFFIEnvSetStream(kDLCUDA, device_, streams_[kGpu], nullptr);
      Call(lane);
    });
  }

  void Call(int64_t lane) {
    const Steps& steps = steps_[lane];
    if (!steps.function.has_value()) return;
    std::vector<ffi::AnyView> arguments(steps.arguments.begin(), steps.arguments.end());
    ffi::Any nothing;
    steps.function.value().CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &nothing);
  }

  template <typename Action>
  void Try(Action action) {
    try {
      action();
    } catch (...) {
      Fail(std::current_exception());
    }
  }

  // The first failure is what the caller gets; lanes that wait are woken, and stop.
  void Fail(std::exception_ptr failure) {
    {
      std::lock_guard<std::mutex> lock(failure_mutex_);
      if (has_failed_) return;
      failure_ = failure;
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
  CudaStream streams_[kLaneCount] = {};  // the CPU's lane has none
  std::deque<Event> events_;  // which never moves them
  std::array<Steps, kLaneCount> steps_;
  std::vector<Slot> slots_;
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
