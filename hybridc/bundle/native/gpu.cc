#include "gpu.h"

#include <algorithm>
#include <cstdio>

#include "refusal.h"
#include "system/architectures.h"

namespace hybridc {
namespace {

constexpr int64_t kDriverPageBytes = 2 << 20;  // in which NVIDIA's drivers reserve allocations

// What a driver reserves for an allocation; less than a page may find room in one.
int64_t Reserved(int64_t size_bytes) {
  if (size_bytes < kDriverPageBytes) return size_bytes;
  return (size_bytes + kDriverPageBytes - 1) / kDriverPageBytes * kDriverPageBytes;
}

template <typename Suits>
const Plan* Largest(const Program& program, Suits suits) {
  const auto found = std::find_if(program.plans.rbegin(), program.plans.rend(), suits);
  return found == program.plans.rend() ? nullptr : &*found;
}

std::string Joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

void CheckGpu(const Program& program, const std::string& folder) {
  constexpr int kCuda = 2, kExists = 0, kComputeVersion = 4;  // kDLCUDA, DeviceAttrKind of TVM's device_api.h
  const ffi::Function attribute = ffi::Function::GetGlobalRequired("runtime.GetDeviceAttr");
  if (!attribute(kCuda, kGpuIndex, kExists).cast<bool>()) return;  // which the first use of the GPU tells
  const std::string version = attribute(kCuda, kGpuIndex, kComputeVersion).cast<std::string>();
  int major = 0, minor = 0;
  std::sscanf(version.c_str(), "%d.%d", &major, &minor);
  if (RunsOn(program.cuda_architectures, major, minor)) return;
  throw Refusal("HC413",
                "the GPU is of compute capability " + version + ", but the bundle's code is for " +
                    Joined(program.cuda_architectures),
                folder, "compile the model for --target cuda:sm_" + std::to_string(major * 10 + minor) + "+...");
}

int64_t FreeGpuBytes(const Library& library) {
  try {
    return library.Help<int64_t>("free_device_bytes", kGpuIndex);
  } catch (const ffi::Error& error) {
    RefuseNoGpu(error.message());
  }
}

const Plan& ChooseWithin(const Program& program, uint64_t gpu_memory_bytes, const std::string& folder) {
  const Plan* plan = Largest(
      program, [&](const Plan& each) { return static_cast<uint64_t>(each.promised_bytes) <= gpu_memory_bytes; });
  if (plan != nullptr) return *plan;
  throw Refusal("HC558", "no plan of the bundle fits " + std::to_string(gpu_memory_bytes) + " bytes of GPU memory",
                folder,
                "the smallest is for " + std::to_string(program.plans.front().promised_bytes) +
                    " bytes; compile with a smaller --gpu-memory");
}

const Plan& ChooseFitting(const Program& program, int64_t free_bytes) {
  const Plan* plan = Largest(program, [&](const Plan& each) { return Reserved(each.gpu_bytes) <= free_bytes; });
  return plan == nullptr ? program.plans.front() : *plan;
}

}  // namespace hybridc
