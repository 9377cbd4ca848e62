// The CUDA driver (libcuda) functions that TVM's runtime calls: modules and launches.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "device.h"
#include "fibers.h"
#include "image.h"
#include "injection.h"
#include "launch.h"
#include "memory.h"
#include "streams.h"

using namespace emulator;

#define DRIVER_API extern "C" __attribute__((visibility("default"))) CUresult

namespace {

struct Module {
  void* library;
  uint64_t image;  // its key
};

struct Function {
  KernelEntry entry;
  uint64_t image;
  std::optional<KernelEntry> counted = {};  // found when it is first asked for
  size_t maximum_dynamic_shared_bytes = kDefaultSharedBytes;
};

constexpr unsigned kMaximumThreads = 1024, kMaximumBlockZ = 64, kMaximumGridYZ = 65535;

bool is_launchable(const CUlaunchConfig& config, const Function& function) {
  const Extent block{config.blockDimX, config.blockDimY, config.blockDimZ};
  if (block.count() == 0 || block.count() > kMaximumThreads || block.z > kMaximumBlockZ) return false;
  if (config.gridDimX == 0 || config.gridDimY == 0 || config.gridDimZ == 0) return false;
  if (config.gridDimY > kMaximumGridYZ || config.gridDimZ > kMaximumGridYZ) return false;
  const size_t shared_bytes = function.entry.static_shared_bytes + config.sharedMemBytes;
  return shared_bytes <= std::max(kDefaultSharedBytes, function.maximum_dynamic_shared_bytes);
}

// Arguments are copied when the launch is called, as the real driver does.
void copy_arguments(Launch& launch, void** arguments) {
  for (int i = 0; i < launch.kernel->argument_count; ++i) {
    const size_t bytes = launch.kernel->argument_bytes[i];
    launch.argument_offsets.push_back(launch.argument_words.size());
    launch.argument_words.resize(launch.argument_words.size() + (bytes + 7) / 8);
    std::memcpy(&launch.argument_words[launch.argument_offsets.back()], arguments[i], bytes);
  }
}

// Of a call that a test asked to fail: the numbers of errors are those of the runtime.
#define FAIL_IF_ASKED() \
  if (const cudaError_t fault = injected_fault(__func__); fault != cudaSuccess) return static_cast<CUresult>(fault)

CUresult device_result() {
  switch (device_failure()) {
    case cudaSuccess: return CUDA_SUCCESS;
    case cudaErrorIllegalAddress: return CUDA_ERROR_ILLEGAL_ADDRESS;
    default: return CUDA_ERROR_LAUNCH_FAILED;
  }
}

const char* result_name(CUresult result) {
  switch (result) {
    case CUDA_SUCCESS: return "CUDA_SUCCESS";
    case CUDA_ERROR_INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case CUDA_ERROR_OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case CUDA_ERROR_INVALID_IMAGE: return "CUDA_ERROR_INVALID_IMAGE";
    case CUDA_ERROR_INVALID_HANDLE: return "CUDA_ERROR_INVALID_HANDLE";
    case CUDA_ERROR_NO_BINARY_FOR_GPU: return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case CUDA_ERROR_NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    case CUDA_ERROR_ILLEGAL_ADDRESS: return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case CUDA_ERROR_LAUNCH_FAILED: return "CUDA_ERROR_LAUNCH_FAILED";
    case CUDA_ERROR_NOT_SUPPORTED: return "CUDA_ERROR_NOT_SUPPORTED";
    default: return "CUDA_ERROR_UNKNOWN";
  }
}

// Libraries by the keys of images.
std::map<uint64_t, std::string>& images() {
  static auto& value = *new std::map<uint64_t, std::string>;
  return value;
}

// The same, compiled to be counted: of what is launched while there are some, accesses are counted.
std::map<uint64_t, std::string>& counted_images() {
  static auto& value = *new std::map<uint64_t, std::string>;
  return value;
}

// nullptr if it cannot be opened.
void* open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::fprintf(stderr, "hybridc emulator: %s\n", dlerror());
  auto* bind = library == nullptr
                   ? nullptr
                   : reinterpret_cast<void (*)(const BlockServices*)>(dlsym(library, "hybridc_bind_services"));
  if (bind == nullptr) return nullptr;
  bind(&BlockRunner::services());
  return library;
}

std::optional<KernelEntry> find_kernel(void* library, const std::string& name) {
  void* address = dlsym(library, ("hybridc_kernel_" + name).c_str());
  if (address == nullptr) return {};
  return reinterpret_cast<KernelEntry (*)()>(address)();
}

// What counts the accesses of the function; nullptr where they are not counted.
const KernelEntry* counted_kernel(Function& function) {
  const auto found = counted_images().find(function.image);
  if (found == counted_images().end()) return nullptr;
  if (!function.counted)
    if (void* library = open_library(found->second)) function.counted = find_kernel(library, function.entry.name);
  return function.counted ? &*function.counted : nullptr;
}

}  // namespace

DRIVER_API cuDeviceGetName(char* name, int size, CUdevice) {
  std::snprintf(name, size, "hybridc emulated GPU");
  return CUDA_SUCCESS;
}

DRIVER_API cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  auto* function = reinterpret_cast<Function*>(handle);
  if (value < 0 || value + function->entry.static_shared_bytes > opt_in_shared_bytes())
    return CUDA_ERROR_INVALID_VALUE;
  function->maximum_dynamic_shared_bytes = value;
  return CUDA_SUCCESS;
}

DRIVER_API cuGetErrorString(CUresult result, const char** text) {
  DeviceLock lock(device_mutex());
  const bool is_failure = result != CUDA_SUCCESS && result == device_result();
  *text = is_failure ? device_failure_message() : result_name(result);
  return CUDA_SUCCESS;
}

// TVM asks for the name alone where a launch fails: it gets the text, which says which kernel did what.
DRIVER_API cuGetErrorName(CUresult result, const char** name) { return cuGetErrorString(result, name); }

// Hopper's tensor copies are beyond what the emulator does.
DRIVER_API cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                  const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                  CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

DRIVER_API cuModuleLoadData(CUmodule* module, const void* image) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  auto found = images().find(image_key(image));
  if (found == images().end()) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  void* library = open_library(found->second);
  if (library == nullptr) return CUDA_ERROR_INVALID_IMAGE;
  *module = reinterpret_cast<CUmodule>(new Module{library, found->first});
  return CUDA_SUCCESS;
}

// The library stays mapped: work that was queued lazily may still name its functions.
DRIVER_API cuModuleUnload(CUmodule module) {
  delete reinterpret_cast<Module*>(module);
  return CUDA_SUCCESS;
}

DRIVER_API cuModuleGetFunction(CUfunction* handle, CUmodule module, const char* name) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  const auto& [library, image] = *reinterpret_cast<Module*>(module);
  const std::optional<KernelEntry> entry = find_kernel(library, name);
  if (!entry) return CUDA_ERROR_NOT_FOUND;
  *handle = reinterpret_cast<CUfunction>(new Function{*entry, image});
  return CUDA_SUCCESS;
}

DRIVER_API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction handle, void** arguments, void**) {
  DeviceLock lock(device_mutex());
  FAIL_IF_ASKED();
  auto* function = reinterpret_cast<Function*>(handle);
  const StreamHandle stream = find_stream(config->hStream);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!is_launchable(*config, *function)) return CUDA_ERROR_INVALID_VALUE;
  if (device_failure() != cudaSuccess) return device_result();
  auto launch = std::make_shared<Launch>();
  launch->kernel = &function->entry;
  launch->counted = counted_kernel(*function);
  launch->grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
  launch->block = {config->blockDimX, config->blockDimY, config->blockDimZ};
  launch->dynamic_shared_bytes = config->sharedMemBytes;
  copy_arguments(*launch, arguments);
  enqueue(stream, [launch] {
    ++statistics().launches;
    run_launch(*launch);
  });
  return CUDA_SUCCESS;  // like on real hardware, what the kernel did shows at the next call that waits
}

// ---- control, called from device.py ----

#define CONTROL_API extern "C" __attribute__((visibility("default")))

// Returns the bytes in use if the new capacity cannot hold them, else 0.
CONTROL_API uint64_t hybridc_emulator_configure(const Configuration* wanted) {
  DeviceLock lock(device_mutex());
  if (wanted->capacity_bytes < statistics().used_bytes) return statistics().used_bytes;
  run_all_streams();
  configuration() = *wanted;
  return 0;
}

CONTROL_API void hybridc_emulator_register_image(uint64_t key, const char* library_path) {
  DeviceLock lock(device_mutex());
  images()[key] = library_path;
}

// From now on accesses are counted, of kernels of the image that `library_path` has compiled to be counted.
CONTROL_API void hybridc_emulator_count_image(uint64_t key, const char* library_path) {
  DeviceLock lock(device_mutex());
  counted_images()[key] = library_path;
}

// Gives up to `capacity` of the launches that were counted, and returns how many there are.
CONTROL_API uint64_t hybridc_emulator_counted_launches(LaunchCounts* target, uint64_t capacity) {
  DeviceLock lock(device_mutex());
  const auto& launches = counted_launches();
  std::copy_n(launches.begin(), std::min<uint64_t>(capacity, launches.size()), target);
  return launches.size();
}

CONTROL_API void hybridc_emulator_stop_counting() {
  DeviceLock lock(device_mutex());
  run_all_streams();
  counted_images().clear();
  counted_launches().clear();
}

CONTROL_API int hybridc_emulator_add_tensors(void* arena, const char* kernel, const TensorRange* tensors,
                                             uint64_t count) {
  DeviceLock lock(device_mutex());
  return add_tensors(arena, kernel, {tensors, tensors + count});
}

CONTROL_API void hybridc_emulator_statistics(Statistics* result) {
  DeviceLock lock(device_mutex());
  *result = statistics();
  result->capacity_bytes = configuration().capacity_bytes;
}

// From now on calls are counted anew, and call number `ordinal` of `function`, if it is one, fails.
CONTROL_API void hybridc_emulator_watch_calls(const char* function, uint64_t ordinal, int error) {
  watch_calls(function, ordinal, static_cast<cudaError_t>(error));
}

// A line for each function that was called since: its name and how often.
CONTROL_API const char* hybridc_emulator_calls() {
  static std::string text;
  DeviceLock lock(device_mutex());
  text = described_calls();
  return text.c_str();
}

CONTROL_API void hybridc_emulator_reset_peak() {
  DeviceLock lock(device_mutex());
  statistics().peak_bytes = statistics().used_bytes;
}

CONTROL_API const char* hybridc_emulator_failure() {
  DeviceLock lock(device_mutex());
  return device_failure_message();
}

CONTROL_API void hybridc_emulator_reset() {
  DeviceLock lock(device_mutex());
  run_all_streams();  // drops what a poisoned device still had queued
  clear_device_failure();
  cudaGetLastError();
}
