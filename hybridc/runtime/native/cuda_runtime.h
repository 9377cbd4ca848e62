// The CUDA runtime, looked up when a GPU is asked for, so that an artifact for the CPU runs where there is
// no CUDA.
#pragma once
#include <dlfcn.h>
#include <tvm/ffi/error.h>

#include <cstddef>

namespace hybridc {

using CudaStream = void*;
using CudaEvent = void*;
using CudaGraph = void*;
using CudaGraphExec = void*;

constexpr int kMemcpyDefault = 4;             // cudaMemcpyDefault
constexpr unsigned kStreamNonBlocking = 1;    // cudaStreamNonBlocking
constexpr unsigned kEventBlockingSync = 1;    // cudaEventBlockingSync: who waits sleeps
constexpr unsigned kEventDisableTiming = 2;   // cudaEventDisableTiming
constexpr int kCaptureThreadLocal = 1;        // cudaStreamCaptureModeThreadLocal: other threads may allocate

// The CUDA runtime that is already in the process (TVM's own, or the emulator's), else the installed one.
class CudaRuntime {
 public:
  static const CudaRuntime& Get() {
    static const CudaRuntime runtime;
    return runtime;
  }

  void Check(int code, const char* call) const {
    if (code == 0) return;
    TVM_FFI_THROW(RuntimeError) << call << " failed: " << error_name(code) << " (" << error_string(code) << ")";
  }

  int (*set_device)(int);
  int (*mem_get_info)(size_t*, size_t*);
  int (*malloc)(void**, size_t);
  int (*free)(void*);
  int (*malloc_host)(void**, size_t);
  int (*free_host)(void*);
  int (*memcpy)(void*, const void*, size_t, int);
  int (*memcpy_async)(void*, const void*, size_t, int, CudaStream);
  int (*stream_create)(CudaStream*, unsigned);
  int (*stream_destroy)(CudaStream);
  int (*stream_synchronize)(CudaStream);
  int (*stream_wait_event)(CudaStream, CudaEvent, unsigned);
  int (*event_create)(CudaEvent*, unsigned);
  int (*event_destroy)(CudaEvent);
  int (*event_record)(CudaEvent, CudaStream);
  int (*event_synchronize)(CudaEvent);
  int (*event_elapsed_time)(float*, CudaEvent, CudaEvent);
  int (*stream_begin_capture)(CudaStream, int);
  int (*stream_end_capture)(CudaStream, CudaGraph*);
  int (*graph_instantiate)(CudaGraphExec*, CudaGraph, unsigned long long);
  int (*graph_launch)(CudaGraphExec, CudaStream);
  int (*graph_destroy)(CudaGraph);
  int (*graph_exec_destroy)(CudaGraphExec);
  int (*get_last_error)();
  const char* (*error_name)(int);
  const char* (*error_string)(int);

 private:
  CudaRuntime() {
    Find("cudaSetDevice", &set_device);
    Find("cudaMemGetInfo", &mem_get_info);
    Find("cudaMalloc", &malloc);
    Find("cudaFree", &free);
    Find("cudaMallocHost", &malloc_host);
    Find("cudaFreeHost", &free_host);
    Find("cudaMemcpy", &memcpy);
    Find("cudaMemcpyAsync", &memcpy_async);
    Find("cudaStreamCreateWithFlags", &stream_create);
    Find("cudaStreamDestroy", &stream_destroy);
    Find("cudaStreamSynchronize", &stream_synchronize);
    Find("cudaStreamWaitEvent", &stream_wait_event);
    Find("cudaEventCreateWithFlags", &event_create);
    Find("cudaEventDestroy", &event_destroy);
    Find("cudaEventRecord", &event_record);
    Find("cudaEventSynchronize", &event_synchronize);
    Find("cudaEventElapsedTime", &event_elapsed_time);
    Find("cudaStreamBeginCapture", &stream_begin_capture);
    Find("cudaStreamEndCapture", &stream_end_capture);
    Find("cudaGraphInstantiate", &graph_instantiate);
    Find("cudaGraphLaunch", &graph_launch);
    Find("cudaGraphDestroy", &graph_destroy);
    Find("cudaGraphExecDestroy", &graph_exec_destroy);
    Find("cudaGetLastError", &get_last_error);
    Find("cudaGetErrorName", &error_name);
    Find("cudaGetErrorString", &error_string);
  }

  template <typename Pointer>
  static void Find(const char* name, Pointer* out) {
    static void* library = dlopen("libcudart.so.13", RTLD_NOW | RTLD_GLOBAL);
    void* symbol = dlsym(RTLD_DEFAULT, name);
    if (symbol == nullptr && library != nullptr) symbol = dlsym(library, name);
    if (symbol == nullptr) TVM_FFI_THROW(RuntimeError) << "the CUDA runtime has no " << name;
    *out = reinterpret_cast<Pointer>(symbol);
  }
};

#define HYBRIDC_CUDA(call, ...) CudaRuntime::Get().Check(CudaRuntime::Get().call(__VA_ARGS__), "cuda " #call)

}  // namespace hybridc
