#include "injection.h"

#include <map>

#include "device.h"

namespace emulator {
namespace {

struct Watch {
  std::map<std::string, uint64_t> calls;
  std::string function;  // which is to fail
  uint64_t ordinal = 0;
  cudaError_t error = cudaSuccess;
};

Watch& watch() {
  static auto& value = *new Watch;
  return value;
}

}  // namespace

void watch_calls(const std::string& function, uint64_t ordinal, cudaError_t error) {
  DeviceLock lock(device_mutex());
  watch() = {{}, function, ordinal, error};
}

cudaError_t injected_fault(const char* function) {
  DeviceLock lock(device_mutex());
  const uint64_t ordinal = watch().calls[function]++;
  if (watch().function != function || watch().ordinal != ordinal) return cudaSuccess;
  if (watch().error == cudaErrorLaunchFailure)
    fail_device(watch().error, std::string(function) + " was asked to fail");
  return watch().error;
}

std::string described_calls() {
  std::string text;
  for (const auto& [function, count] : watch().calls) text += function + " " + std::to_string(count) + "\n";
  return text;
}

}  // namespace emulator
