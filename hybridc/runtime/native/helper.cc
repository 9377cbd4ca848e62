// What the VM functions of an artifact call beside its kernels: views of arenas, copies and events of
// lanes; and what a session calls: lanes, and the memory that arenas are made of. Linked into the artifact's
// own library; needs the headers of tvm_ffi only.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "cuda_runtime.h"
#include "lanes.h"

namespace hybridc {

constexpr size_t kHostAlignment = 4096;  // a page, as cudaMallocHost gives

static Lanes* AsLanes(int64_t handle) { return reinterpret_cast<Lanes*>(handle); }
static char* Bytes(const ffi::Tensor& t) { return static_cast<char*>(t.data_ptr()) + t.byte_offset(); }
static size_t SizeBytes(const ffi::Tensor& t) { return ffi::GetDataSize(t.numel(), t.dtype()); }

// A handle for the other functions.
int64_t OpenLanes(bool cuda, int64_t device, int64_t event_count) {
  auto lanes = std::make_unique<Lanes>(cuda, static_cast<int>(device));
  lanes->Open(event_count);
  return reinterpret_cast<int64_t>(lanes.release());
}

void CloseLanes(int64_t handle) { delete AsLanes(handle); }

void SetSteps(int64_t handle, int64_t lane, ffi::Function steps, ffi::Array<ffi::Any> arguments) {
  AsLanes(handle)->SetSteps(lane, steps, arguments);
}

void SetSlots(int64_t handle, ffi::Tensor pinned, int64_t count) {
  AsLanes(handle)->SetSlots(Bytes(pinned), count, static_cast<int64_t>(SizeBytes(pinned)) / count);
}

void Run(int64_t handle) { AsLanes(handle)->Run(); }

ffi::Function Instrument(int64_t handle, int64_t lane) { return AsLanes(handle)->Instrument(lane); }

ffi::Array<double> TraceOf(int64_t handle, int64_t lane) { return AsLanes(handle)->TraceOf(lane); }

void CopyOnLane(int64_t handle, int64_t lane, ffi::Tensor source, ffi::Tensor target) {
  AsLanes(handle)->Copy(lane, Bytes(target), Bytes(source), SizeBytes(target));
}

void StreamWeight(int64_t handle, ffi::Tensor source, ffi::Tensor target) {
  AsLanes(handle)->Stream(Bytes(target), Bytes(source), SizeBytes(target));
}

void Record(int64_t handle, int64_t lane, int64_t event) { AsLanes(handle)->Record(lane, event); }

void Wait(int64_t handle, int64_t lane, int64_t event) { AsLanes(handle)->Wait(lane, event); }

// Bytes of an arena as a tensor of its own, whose offset is zero: compiled kernels accept no other.
struct ViewAllocation {
  ffi::Tensor arena;
  int64_t offset_bytes;
  void AllocData(DLTensor* tensor) { tensor->data = Bytes(arena) + offset_bytes; }
  void FreeData(DLTensor*) {}
};

ffi::Tensor ArenaView(ffi::Tensor arena, int64_t offset_bytes, ffi::Shape shape, DLDataType dtype) {
  ffi::Tensor view =
      ffi::Tensor::FromNDAlloc(ViewAllocation{arena, offset_bytes}, shape, dtype, arena.device());
  if (offset_bytes < 0 || offset_bytes + SizeBytes(view) > SizeBytes(arena)) {
    TVM_FFI_THROW(ValueError) << "a view of " << SizeBytes(view) << " bytes at " << offset_bytes
                              << " leaves an arena of " << SizeBytes(arena) << " bytes";
  }
  return view;
}

struct DeviceAllocation {
  void AllocData(DLTensor* tensor) { HYBRIDC_CUDA(malloc, &tensor->data, ffi::GetDataSize(*tensor)); }
  void FreeData(DLTensor* tensor) { CudaRuntime::Get().free(tensor->data); }
};

struct PinnedAllocation {
  void AllocData(DLTensor* tensor) { HYBRIDC_CUDA(malloc_host, &tensor->data, ffi::GetDataSize(*tensor)); }
  void FreeData(DLTensor* tensor) { CudaRuntime::Get().free_host(tensor->data); }
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
  HYBRIDC_CUDA(set_device, static_cast<int>(device));
  return ffi::Tensor::FromNDAlloc(DeviceAllocation{}, ffi::Shape({size_bytes}), kByte,
                                  DLDevice{kDLCUDA, static_cast<int32_t>(device)});
}

// Host memory as a plain CPU tensor, so that CPU kernels accept it; pinned, so that copies are asynchronous.
ffi::Tensor HostArena(int64_t size_bytes, bool pinned) {
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
  HYBRIDC_CUDA(memcpy, Bytes(target), Bytes(source), SizeBytes(target), kMemcpyDefault);
  HYBRIDC_CUDA(stream_synchronize, nullptr);
}

}  // namespace hybridc

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_open_lanes, hybridc::OpenLanes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_close_lanes, hybridc::CloseLanes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_set_steps, hybridc::SetSteps);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_set_slots, hybridc::SetSlots);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_run, hybridc::Run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_instrument, hybridc::Instrument);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_trace, hybridc::TraceOf);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_copy, hybridc::CopyOnLane);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_stream_weight, hybridc::StreamWeight);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_record, hybridc::Record);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_wait, hybridc::Wait);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_arena_view, hybridc::ArenaView);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_device_arena, hybridc::DeviceArena);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_host_arena, hybridc::HostArena);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_free_device_bytes, hybridc::FreeDeviceBytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_upload, hybridc::Upload);
