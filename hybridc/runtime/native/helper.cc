// What a session calls: the memory that arenas are made of, views of them, and lanes that issue steps. Linked
// into the artifact's own library; needs the headers of tvm_ffi only.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "arrays.h"
#include "cuda_runtime.h"
#include "entries.h"
#include "lanes.h"

namespace hybridc {

constexpr size_t kHostAlignment = 4096;  // a page, as cudaMallocHost gives

static Lanes* AsLanes(int64_t handle) { return reinterpret_cast<Lanes*>(handle); }

// A handle for the other functions.
int64_t OpenLanes(bool cuda, int64_t device, int64_t thread_count) {
  auto lanes = std::make_unique<Lanes>(cuda, static_cast<int>(device), static_cast<int>(thread_count));
  lanes->Open();
  return reinterpret_cast<int64_t>(lanes.release());
}

void CloseLanes(int64_t handle) {
  if (!AsLanes(handle)->IsForked()) delete AsLanes(handle);
}

void ShareWorkers(int64_t handle, int64_t others) { AsLanes(handle)->ShareWorkers(*AsLanes(others)); }

void AddCall(int64_t handle, int64_t lane, ffi::Shape waits, ffi::Function function,
             ffi::Array<ffi::Tensor> arrays, int64_t event) {
  AsLanes(handle)->AddCall(lane, waits, function, arrays, event);
}

void AddCopy(int64_t handle, int64_t lane, ffi::Shape waits, ffi::Tensor source, ffi::Tensor target,
             int64_t event) {
  AsLanes(handle)->AddCopy(lane, waits, source, target, event);
}

void AddStream(int64_t handle, ffi::Shape waits, ffi::Tensor source, ffi::Tensor target, int64_t event) {
  AsLanes(handle)->AddStream(waits, source, target, event);
}

void GuardStep(int64_t handle, int64_t lane, ffi::Array<ffi::Tensor> conditions, ffi::Shape values) {
  AsLanes(handle)->GuardStep(lane, conditions, values);
}

void SetSlots(int64_t handle, ffi::Tensor pinned, int64_t count) { AsLanes(handle)->SetSlots(pinned, count); }

void SetFaults(int64_t handle, ffi::Tensor faults) { AsLanes(handle)->SetFaults(faults); }

int64_t Run(int64_t handle) { return AsLanes(handle)->Run(); }

ffi::Array<int64_t> FailedStep(int64_t handle) { return AsLanes(handle)->FailedStep(); }

void StartTracing(int64_t handle) { AsLanes(handle)->StartTracing(); }

ffi::Array<double> TraceOf(int64_t handle, int64_t lane) { return AsLanes(handle)->TraceOf(lane); }

// Bytes of an arena as a tensor of its own, whose offset is zero: compiled kernels accept no other.
struct ViewAllocation {
  ffi::Tensor arena;
  int64_t offset_bytes;
  void AllocData(DLTensor* tensor) { tensor->data = Bytes(arena) + offset_bytes; }
  void FreeData(DLTensor*) {}
};

ffi::Tensor ViewOn(DLDevice device, ffi::Tensor arena, int64_t offset_bytes, ffi::Shape shape, DLDataType dtype) {
  const int64_t size_bytes = CheckedSizeBytes(shape, dtype), arena_bytes = SizeBytes(arena);
  if (offset_bytes < 0 || size_bytes > arena_bytes || offset_bytes > arena_bytes - size_bytes) {
    TVM_FFI_THROW(ValueError) << "a view of " << size_bytes << " bytes at " << offset_bytes
                              << " leaves an arena of " << arena_bytes << " bytes";
  }
  return ffi::Tensor::FromNDAlloc(ViewAllocation{arena, offset_bytes}, shape, dtype, device);
}

ffi::Tensor ArenaView(ffi::Tensor arena, int64_t offset_bytes, ffi::Shape shape, DLDataType dtype) {
  CheckIsThere(arena);
  return ViewOn(arena.device(), arena, offset_bytes, shape, dtype);
}

// Pinned host memory as kernels of the GPU see it: at the same address (unified virtual addressing).
ffi::Tensor PinnedView(int64_t device, ffi::Tensor pinned, int64_t offset_bytes, ffi::Shape shape, DLDataType dtype) {
  CheckDevice(pinned, kDLCPU);
  return ViewOn({kDLCUDA, static_cast<int32_t>(device)}, pinned, offset_bytes, shape, dtype);
}

// CUDA's memory belongs to the process that took it; one that was forked since must not call CUDA.
struct DeviceAllocation {
  pid_t process = getpid();
  void AllocData(DLTensor* tensor) { HYBRIDC_CUDA(malloc, &tensor->data, ffi::GetDataSize(*tensor)); }
  void FreeData(DLTensor* tensor) {
    if (process == getpid()) CudaRuntime::Get().free(tensor->data);
  }
};

struct PinnedAllocation {
  pid_t process = getpid();
  void AllocData(DLTensor* tensor) { HYBRIDC_CUDA(malloc_host, &tensor->data, ffi::GetDataSize(*tensor)); }
  void FreeData(DLTensor* tensor) {
    if (process == getpid()) CudaRuntime::Get().free_host(tensor->data);
  }
};

struct PageableAllocation {
  void AllocData(DLTensor* tensor) {
    if (posix_memalign(&tensor->data, kHostAlignment, ffi::GetDataSize(*tensor)) != 0) {
      TVM_FFI_THROW(MemoryError) << "no memory for " << ffi::GetDataSize(*tensor) << " bytes";
    }
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

constexpr DLDataType kByte{kDLUInt, 8, 1};

ffi::Tensor DeviceArena(int64_t device, int64_t size_bytes) {
  Check(size_bytes >= 0, "an arena has no negative size");
  HYBRIDC_CUDA(set_device, static_cast<int>(device));
  return ffi::Tensor::FromNDAlloc(DeviceAllocation{}, ffi::Shape({size_bytes}), kByte,
                                  DLDevice{kDLCUDA, static_cast<int32_t>(device)});
}

// Host memory as a plain CPU tensor, so that CPU kernels accept it; pinned, so that copies are asynchronous.
ffi::Tensor HostArena(int64_t size_bytes, bool pinned) {
  Check(size_bytes >= 0, "an arena has no negative size");
  ffi::Shape shape({size_bytes});
  DLDevice cpu{kDLCPU, 0};
  if (pinned) return ffi::Tensor::FromNDAlloc(PinnedAllocation{}, shape, kByte, cpu);
  return ffi::Tensor::FromNDAlloc(PageableAllocation{}, shape, kByte, cpu);
}

int64_t FreeDeviceBytes(int64_t device) {
  size_t available = 0, total = 0;
  HYBRIDC_CUDA(set_device, static_cast<int>(device));
  HYBRIDC_CUDA(mem_get_info, &available, &total);
  return static_cast<int64_t>(available);
}

// From pageable memory cudaMemcpy may return before all bytes are on the GPU, and the lanes' streams do not wait
// for the default stream, which it uses.
void Upload(ffi::Tensor source, ffi::Tensor target) {
  CheckSameSize(source, target);
  HYBRIDC_CUDA(memcpy, Bytes(target), Bytes(source), SizeBytes(target), kMemcpyDefault);
  HYBRIDC_CUDA(stream_synchronize, nullptr);
}

}  // namespace hybridc

// What the functions of the CPU jump to, with their entries.
extern "C" int hybridc_enter(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result,
                             const hybridc::Entry* entry) {
  return hybridc::Enter(self, arguments, count, result, *entry);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_open_lanes, hybridc::OpenLanes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_close_lanes, hybridc::CloseLanes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_share_workers, hybridc::ShareWorkers);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_add_call, hybridc::AddCall);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_add_copy, hybridc::AddCopy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_add_stream, hybridc::AddStream);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_guard_step, hybridc::GuardStep);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_set_slots, hybridc::SetSlots);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_set_faults, hybridc::SetFaults);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_run, hybridc::Run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_failed_step, hybridc::FailedStep);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_start_tracing, hybridc::StartTracing);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_trace, hybridc::TraceOf);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_arena_view, hybridc::ArenaView);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_pinned_view, hybridc::PinnedView);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_device_arena, hybridc::DeviceArena);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_host_arena, hybridc::HostArena);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_free_device_bytes, hybridc::FreeDeviceBytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_upload, hybridc::Upload);
