// When each step of a lane begins and ends, between its waits and what it records: by CUDA events on the lane's
// stream, or by the host's clock where there is none.
#pragma once
#include <chrono>
#include <vector>

#include "cuda_runtime.h"

namespace hybridc {

constexpr unsigned kEventDefault = 0;  // cudaEventDefault: it has a time

class Trace {
 public:
  using Clock = std::chrono::steady_clock;

  ~Trace() {
    for (CudaEvent event : events_) CudaRuntime::Get().event_destroy(event);
  }

  void Clear() {
    used_ = 0;
    times_.clear();
  }

  // `stream` is null on the lanes of the CPU and the network.
  void Mark(CudaStream stream) {
    if (stream == nullptr) {
      times_.push_back(Clock::now());
      return;
    }
    if (used_ == events_.size()) {
      CudaEvent event = nullptr;  // of which a later run must find none where it cannot be made
      HYBRIDC_CUDA(event_create, &event, kEventDefault);
      events_.push_back(event);
    }
    HYBRIDC_CUDA(event_record, events_[used_++], stream);
  }

  // Microseconds of every mark since `base` was recorded, which was at `start` on the host's clock.
  std::vector<double> Microseconds(CudaEvent base, Clock::time_point start) const {
    std::vector<double> result;
    for (Clock::time_point time : times_) {
      result.push_back(std::chrono::duration<double, std::micro>(time - start).count());
    }
    for (size_t i = 0; i < used_; ++i) {
      float milliseconds = 0;
      HYBRIDC_CUDA(event_elapsed_time, &milliseconds, base, events_[i]);
      result.push_back(milliseconds * 1e3);
    }
    return result;
  }

 private:
  std::vector<Clock::time_point> times_;
  std::vector<CudaEvent> events_;  // of which `used_` are recorded; they are made once
  size_t used_ = 0;
};

}  // namespace hybridc
