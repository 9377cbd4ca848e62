// Kernels as CUDA graphs: one launch from the host for all of them.
#pragma once
#include <tvm/ffi/extra/c_env_api.h>

#include <utility>

#include "cuda_runtime.h"

namespace hybridc {

// What was captured of a stream, to be launched again and again with the same arguments.
class KernelGraph {
 public:
  // Captures the kernels that `launch` starts on the stream, which nothing else may use meanwhile. Their code has
  // to be loaded: capturing may not. Where CUDA does not do it, for want of memory for instance, the graph is empty.
  template <typename Action>
  static KernelGraph Capture(int device, CudaStream stream, Action launch) {
    const CudaRuntime& runtime = CudaRuntime::Get();
    KernelGraph result;
    CudaGraph captured = nullptr;
    if (runtime.stream_begin_capture(stream, kCaptureThreadLocal) == 0) {
      const bool is_launched = IsLaunched(device, stream, launch);
      const bool is_captured = runtime.stream_end_capture(stream, &captured) == 0;
      if (is_launched && is_captured && runtime.graph_instantiate(&result.executable_, captured, 0) != 0) {
        result.executable_ = nullptr;
      }
    }
    if (captured != nullptr) runtime.graph_destroy(captured);
    runtime.get_last_error();  // which a later call would report
    return result;
  }

  KernelGraph(KernelGraph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}
  KernelGraph& operator=(KernelGraph&&) = delete;
  ~KernelGraph() {
    if (executable_ != nullptr) CudaRuntime::Get().graph_exec_destroy(executable_);
  }

  bool is_empty() const { return executable_ == nullptr; }

  void Launch(CudaStream stream) const { HYBRIDC_CUDA(graph_launch, executable_, stream); }

 private:
  KernelGraph() = default;

  // TVM launches kernels on the stream that is set for the thread.
  template <typename Action>
  static bool IsLaunched(int device, CudaStream stream, Action launch) {
    TVMFFIStreamHandle before = nullptr;
    TVMFFIEnvSetStream(kDLCUDA, device, stream, &before);
    bool is_launched = true;
    try {
      launch();
    } catch (...) {  // kernels that ran before: what failed is the capture
      is_launched = false;
    }
    TVMFFIEnvSetStream(kDLCUDA, device, before, nullptr);
    return is_launched;
  }

  CudaGraphExec executable_ = nullptr;
};

}  // namespace hybridc
