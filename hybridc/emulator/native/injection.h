// Faults that a test asks for: one call of the driver or the runtime fails, as if memory or the device had given up.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace emulator {

// Counts calls from 0 again. Call number `ordinal` (from 0) of `function` fails with `error`; a launch failure also
// poisons the device. "": none fails.
void watch_calls(const std::string& function, uint64_t ordinal, cudaError_t error);

// Counts a call, and tells what it has to fail with before it does anything: cudaSuccess for all but one.
cudaError_t injected_fault(const char* function);

// A line for each function that was called: its name and how often.
std::string described_calls();

}  // namespace emulator
