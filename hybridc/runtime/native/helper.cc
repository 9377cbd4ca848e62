// What the VM program of an artifact calls beside its kernels: views of arenas, lanes (CUDA streams and
// events), copies on a lane, and the memory the arenas are made of. Linked into the artifact's own
// library; needs the headers of tvm_ffi only. The CUDA runtime is looked up when a GPU is asked for, so
// that an artifact for the CPU runs where there is no CUDA.
#include <dlfcn.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace hybridc {

namespace ffi = tvm::ffi;

using CudaStream = void*;
using CudaEvent = void*;

constexpr int kMemcpyDefault = 4;             // cudaMemcpyDefault
constexpr unsigned kStreamNonBlocking = 1;    // cudaStreamNonBlocking
constexpr unsigned kEventDisableTiming = 2;   // cudaEventDisableTiming
constexpr size_t kHostAlignment = 4096;       // a page, as cudaMallocHost gives
enum LaneIndex : int64_t { kGpu = 0, kHostToDevice = 1, kDeviceToHost = 2, kLaneCount = 3 };

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

struct Lanes {
  bool cuda = false;
  int device = 0;
  CudaStream streams[kLaneCount] = {};
  std::vector<CudaEvent> events;
  TVMFFIStreamHandle outer_stream = nullptr;

  ~Lanes() {
    if (!cuda) return;
    const CudaRuntime& runtime = CudaRuntime::Get();
    for (CudaEvent event : events) runtime.event_destroy(event);
    for (CudaStream stream : streams) {
      if (stream != nullptr) runtime.stream_destroy(stream);
    }
  }
};

static Lanes* AsLanes(int64_t handle) { return reinterpret_cast<Lanes*>(handle); }
static char* Bytes(const ffi::Tensor& t) { return static_cast<char*>(t.data_ptr()) + t.byte_offset(); }
static size_t SizeBytes(const ffi::Tensor& t) { return ffi::GetDataSize(t.numel(), t.dtype()); }

// A handle for the other functions. Streams are created so that the null stream does not order them.
int64_t OpenLanes(bool cuda, int64_t device, int64_t event_count) {
  auto lanes = std::make_unique<Lanes>();
  lanes->cuda = cuda;
  lanes->device = static_cast<int>(device);
  if (cuda) {
    HYBRIDC_CUDA(set_device, lanes->device);
    for (CudaStream& stream : lanes->streams) HYBRIDC_CUDA(stream_create, &stream, kStreamNonBlocking);
    for (int64_t i = 0; i < event_count; ++i) {
      CudaEvent event = nullptr;
      HYBRIDC_CUDA(event_create, &event, kEventDisableTiming);
      lanes->events.push_back(event);
    }
  }
  return reinterpret_cast<int64_t>(lanes.release());
}

void CloseLanes(int64_t handle) { delete AsLanes(handle); }

// Makes the GPU lane the stream that this thread's kernels are launched on.
void EnterLanes(int64_t handle) {
  Lanes* lanes = AsLanes(handle);
  if (!lanes->cuda) return;
  HYBRIDC_CUDA(set_device, lanes->device);
  TVMFFIEnvSetStream(kDLCUDA, lanes->device, lanes->streams[kGpu], &lanes->outer_stream);
}

void FinishLanes(int64_t handle) {
  Lanes* lanes = AsLanes(handle);
  if (!lanes->cuda) return;
  for (CudaStream stream : lanes->streams) HYBRIDC_CUDA(stream_synchronize, stream);
}

// Undoes EnterLanes, also after a run that failed half-way: nothing may still write into the arenas.
void LeaveLanes(int64_t handle) {
  Lanes* lanes = AsLanes(handle);
  if (!lanes->cuda) return;
  TVMFFIEnvSetStream(kDLCUDA, lanes->device, lanes->outer_stream, nullptr);
  FinishLanes(handle);
}

void CopyOnLane(int64_t handle, int64_t lane, ffi::Tensor source, ffi::Tensor target) {
  HYBRIDC_CUDA(memcpy_async, Bytes(target), Bytes(source), SizeBytes(target), kMemcpyDefault,
               AsLanes(handle)->streams[lane]);
}

void RecordEvent(int64_t handle, int64_t lane, int64_t event) {
  Lanes* lanes = AsLanes(handle);
  HYBRIDC_CUDA(event_record, lanes->events.at(event), lanes->streams[lane]);
}

void LaneWaits(int64_t handle, int64_t lane, int64_t event) {
  Lanes* lanes = AsLanes(handle);
  HYBRIDC_CUDA(stream_wait_event, lanes->streams[lane], lanes->events.at(event), 0);
}

void HostWaits(int64_t handle, int64_t event) {
  HYBRIDC_CUDA(event_synchronize, AsLanes(handle)->events.at(event));
}

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

void Upload(ffi::Tensor source, ffi::Tensor target) {
  HYBRIDC_CUDA(memcpy, Bytes(target), Bytes(source), SizeBytes(target), kMemcpyDefault);
}

}  // namespace hybridc

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_open_lanes, hybridc::OpenLanes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_close_lanes, hybridc::CloseLanes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_enter_lanes, hybridc::EnterLanes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_finish_lanes, hybridc::FinishLanes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_leave_lanes, hybridc::LeaveLanes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_copy, hybridc::CopyOnLane);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_record, hybridc::RecordEvent);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_lane_waits, hybridc::LaneWaits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_host_waits, hybridc::HostWaits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_arena_view, hybridc::ArenaView);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_device_arena, hybridc::DeviceArena);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_host_arena, hybridc::HostArena);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_free_device_bytes, hybridc::FreeDeviceBytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hybridc_upload, hybridc::Upload);
