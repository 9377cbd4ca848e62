#include "device.h"

#include <set>

namespace emulator {

Configuration& configuration() {
  static Configuration value{0, 0, 8, 0, kForward, 0, 1, 0};
  return value;
}

Statistics& statistics() {
  static Statistics value{};
  return value;
}

std::recursive_mutex& device_mutex() {
  static auto& mutex = *new std::recursive_mutex;
  return mutex;
}

static cudaError_t failure = cudaSuccess;
static const std::string* failure_text = nullptr;

void fail_device(cudaError_t error, const std::string& message) {
  if (failure != cudaSuccess) return;  // the first cause is the one worth reading
  // Callers keep the char* of cudaGetErrorString, so a text is never freed.
  static auto& texts = *new std::set<std::string>;
  failure = error;
  failure_text = &*texts.insert(message).first;
}

cudaError_t device_failure() { return failure; }

const char* device_failure_message() { return failure_text ? failure_text->c_str() : ""; }

void clear_device_failure() {
  failure = cudaSuccess;
  failure_text = nullptr;
}

size_t opt_in_shared_bytes() {
  const int capability = configuration().compute_major * 10 + configuration().compute_minor;
  if (capability >= 120) return 99 << 10;
  if (capability >= 90) return 227 << 10;
  if (capability == 80 || capability == 87) return 163 << 10;
  if (capability >= 86) return 99 << 10;
  if (capability == 75) return 64 << 10;
  return 96 << 10;  // Volta
}

}  // namespace emulator
