// The CUDA runtime (libcudart) functions that TVM's runtime and hybridc's native helper call.
#include <cstring>
#include <utility>

#include "device.h"
#include "injection.h"
#include "memory.h"
#include "streams.h"

using namespace emulator;

#define CUDA_API extern "C" __attribute__((visibility("default"))) cudaError_t

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// Of a call that a test asked to fail.
#define FAIL_IF_ASKED() \
  if (const cudaError_t fault = injected_fault(__func__); fault != cudaSuccess) return report(fault)

// A poisoned device answers everything with its failure.
cudaError_t finish() { return report(device_failure()); }

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

struct Graph {
  std::vector<Operation> operations;

  explicit Graph(std::vector<Operation> captured) : operations(std::move(captured)) { ++statistics().graphs; }
  Graph(const Graph& other) : Graph(other.operations) {}
  ~Graph() { --statistics().graphs; }
};

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};

constexpr ErrorText kErrorTexts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
};

const ErrorText& error_text(cudaError_t error) {
  static constexpr ErrorText unknown{cudaErrorUnknown, "cudaErrorUnknown", "unknown error"};
  for (const ErrorText& known : kErrorTexts)
    if (known.error == error) return known;
  return unknown;
}

cudaMemcpyKind actual_kind(const void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  if (kind != cudaMemcpyDefault) return kind;
  const bool to_device = is_device_memory(target, size), from_device = is_device_memory(source, size);
  if (to_device) return from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
  return from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
}

bool is_valid_copy(const void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  return to_device == is_device_memory(target, size) && from_device == is_device_memory(source, size);
}

void count_copy(cudaMemcpyKind kind, size_t size) {
  Statistics& counters = statistics();
  if (kind == cudaMemcpyHostToDevice) ++counters.h2d_copies, counters.h2d_bytes += size;
  if (kind == cudaMemcpyDeviceToHost) ++counters.d2h_copies, counters.d2h_bytes += size;
}

}  // namespace

// ---- device ----

CUDA_API cudaGetDeviceCount(int* count) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  *count = configuration().present ? 1 : 0;
  return report(*count ? cudaSuccess : cudaErrorNoDevice);
}

CUDA_API cudaSetDevice(int device) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  return report(device == 0 && configuration().present ? cudaSuccess : cudaErrorInvalidDevice);
}

CUDA_API cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

CUDA_API cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimX: *value = 1024; break;
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kDefaultSharedBytes; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(opt_in_shared_bytes()); break;
    case cudaDevAttrComputeCapabilityMajor: *value = configuration().compute_major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = configuration().compute_minor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrClockRate: *value = 1'000'000; break;  // kHz; nobody may read speed off the emulator
    case cudaDevAttrMultiProcessorCount: *value = configuration().worker_count; break;
    case cudaDevAttrL2CacheSize: *value = 4 << 20; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

CUDA_API cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  DeviceLock lock(device_mutex());
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "hybridc emulated GPU");
  properties->totalGlobalMem = configuration().capacity_bytes;
  properties->sharedMemPerBlock = kDefaultSharedBytes;
  properties->sharedMemPerBlockOptin = opt_in_shared_bytes();
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->major = configuration().compute_major;
  properties->minor = configuration().compute_minor;
  properties->multiProcessorCount = configuration().worker_count;
  return cudaSuccess;
}

CUDA_API cudaDeviceSynchronize() {
  DeviceLock lock(device_mutex());
  run_all_streams();
  return finish();
}

// ---- memory ----

CUDA_API cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  *total_bytes = configuration().capacity_bytes;
  *free_bytes = *total_bytes - statistics().used_bytes;
  return cudaSuccess;
}

CUDA_API cudaMalloc(void** pointer, size_t size_bytes) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  if (device_failure() != cudaSuccess) return finish();
  return report(allocate_device(pointer, size_bytes));
}

// Releasing works on a poisoned device too: destructors call it, and must not throw.
CUDA_API cudaFree(void* pointer) {
  DeviceLock lock(device_mutex());
  run_all_streams();
  return report(release_device(pointer));
}

CUDA_API cudaHostAlloc(void** pointer, size_t size_bytes, unsigned) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  return report(allocate_pinned(pointer, size_bytes));
}

CUDA_API cudaMallocHost(void** pointer, size_t size_bytes) { return cudaHostAlloc(pointer, size_bytes, 0); }

CUDA_API cudaFreeHost(void* pointer) {
  DeviceLock lock(device_mutex());
  run_all_streams();
  return report(release_pinned(pointer));
}

CUDA_API cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind,
                         cudaStream_t handle) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  const StreamHandle stream = find_stream(handle);
  if (!stream) return report(cudaErrorInvalidResourceHandle);
  if (size == 0) return finish();
  kind = actual_kind(target, source, size, kind);
  if (!is_valid_copy(target, source, size, kind)) return report(cudaErrorInvalidValue);
  count_copy(kind, size);
  if (kind == cudaMemcpyHostToDevice && !is_pinned_memory(source, size) && configuration().lazy_streams) {
    // Pageable memory is staged before the call returns, so the caller may overwrite it.
    const auto* bytes = static_cast<const char*>(source);
    enqueue(stream, [target, staged = std::vector<char>(bytes, bytes + size)] {
      std::memcpy(target, staged.data(), staged.size());
    });
  } else {
    enqueue(stream, [=] { std::memmove(target, source, size); });
  }
  const bool is_pageable_download = kind == cudaMemcpyDeviceToHost && !is_pinned_memory(target, size);
  if ((is_pageable_download || kind == cudaMemcpyHostToHost) && !stream->is_capturing) run_stream(stream);
  return finish();
}

// Of pageable memory it returns when the bytes are staged: their way to the device may last until something
// waits for the default stream.
CUDA_API cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  DeviceLock lock(device_mutex());
  const cudaError_t error = cudaMemcpyAsync(target, source, size, kind, nullptr);
  if (error != cudaSuccess) return error;
  const bool is_upload = actual_kind(target, source, size, kind) == cudaMemcpyHostToDevice;
  if (!is_upload || is_pinned_memory(source, size)) run_stream(find_stream(nullptr));
  return finish();
}

CUDA_API cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(target, source, size, cudaMemcpyDeviceToDevice, stream);
}

CUDA_API cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t handle) {
  DeviceLock lock(device_mutex());
  const StreamHandle stream = find_stream(handle);
  if (!stream) return report(cudaErrorInvalidResourceHandle);
  if (size > 0 && !is_device_memory(target, size)) return report(cudaErrorInvalidValue);
  enqueue(stream, [=] { std::memset(target, value, size); });
  return finish();
}

CUDA_API cudaMemset(void* target, int value, size_t size) {
  return cudaMemsetAsync(target, value, size, nullptr);
}

// ---- streams and events ----

CUDA_API cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  *handle = reinterpret_cast<cudaStream_t>(create_stream(!(flags & cudaStreamNonBlocking)).get());
  return finish();
}

CUDA_API cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithFlags(handle, cudaStreamDefault);
}

CUDA_API cudaStreamDestroy(cudaStream_t handle) {
  DeviceLock lock(device_mutex());
  destroy_stream(reinterpret_cast<Stream*>(handle));
  return cudaSuccess;
}

CUDA_API cudaStreamSynchronize(cudaStream_t handle) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  const StreamHandle stream = find_stream(handle);
  if (!stream) return report(cudaErrorInvalidResourceHandle);
  if (stream->is_capturing) return report(cudaErrorStreamCaptureUnsupported);
  // Waiting for the legacy default stream includes the blocking streams: record that before running.
  if (stream == find_stream(nullptr)) enqueue(stream, [] {});
  run_stream(stream);
  return finish();
}

CUDA_API cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  ++statistics().events;
  *handle = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

CUDA_API cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, cudaEventDefault); }

// Waits that were made on the event keep their own copy of the recorded point.
CUDA_API cudaEventDestroy(cudaEvent_t handle) {
  DeviceLock lock(device_mutex());
  delete event_of(handle);
  --statistics().events;
  return cudaSuccess;
}

CUDA_API cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  const StreamHandle stream = find_stream(stream_handle);
  if (!stream) return report(cudaErrorInvalidResourceHandle);
  record_event(stream, *event_of(handle));
  return finish();
}

CUDA_API cudaEventSynchronize(cudaEvent_t handle) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  run_until(event_of(handle)->recorded);
  return finish();
}

CUDA_API cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  if (!event_of(start)->recorded.stream || !event_of(end)->recorded.stream)
    return report(cudaErrorInvalidResourceHandle);
  if (!is_complete(*event_of(start)) || !is_complete(*event_of(end))) return cudaErrorNotReady;
  const auto elapsed = *event_of(end)->time - *event_of(start)->time;
  *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
  return finish();
}

CUDA_API cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  const StreamHandle stream = find_stream(handle);
  if (!stream) return report(cudaErrorInvalidResourceHandle);
  wait_for_event(stream, *event_of(event));
  return finish();
}

// ---- graphs: a recorded list of operations ----

CUDA_API cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  const StreamHandle stream = find_stream(handle);
  if (!stream || stream == find_stream(nullptr)) return report(cudaErrorStreamCaptureUnsupported);
  stream->is_capturing = true;
  return finish();
}

CUDA_API cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  DeviceLock lock(device_mutex());
  const StreamHandle stream = find_stream(handle);
  if (!stream || !stream->is_capturing) return report(cudaErrorInvalidResourceHandle);
  stream->is_capturing = false;
  const auto captured = std::exchange(stream->captured, {});
  FAIL_IF_ASKED();  // whose capture has ended all the same
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(captured));
  return finish();
}

CUDA_API cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  if (configuration().refuse_graphs) return report(cudaErrorMemoryAllocation);
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

CUDA_API cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  const StreamHandle stream = find_stream(handle);
  if (!stream) return report(cudaErrorInvalidResourceHandle);
  ++statistics().graph_launches;
  for (const Operation& operation : reinterpret_cast<Graph*>(executable)->operations)
    enqueue(stream, operation.work);
  return finish();
}

CUDA_API cudaGraphDestroy(cudaGraph_t graph) {
  DeviceLock lock(device_mutex());
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

CUDA_API cudaGraphExecDestroy(cudaGraphExec_t executable) {
  DeviceLock lock(device_mutex());
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}

// ---- errors ----

CUDA_API cudaPeekAtLastError() {
  DeviceLock lock(device_mutex());
  return device_failure() != cudaSuccess ? device_failure() : last_error;
}

CUDA_API cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}

extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorName(cudaError_t error) {
  return error_text(error).name;
}

// The text of the device's own failure says which kernel did what, so that TVM's exception says it too.
extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorString(cudaError_t error) {
  DeviceLock lock(device_mutex());
  const bool is_failure = error != cudaSuccess && error == device_failure();
  return is_failure ? device_failure_message() : error_text(error).text;
}
