// The GPU that a bundle's plans are for.
#pragma once
#include <cstdint>
#include <string>

#include "library.h"
#include "program/program.h"

namespace hybridc {

constexpr int64_t kGpuIndex = 0;

// Throws HC413 where the GPU can load neither machine code nor PTX of the program.
void CheckGpu(const Program& program, const std::string& folder);

// Memory of the GPU that nobody holds. Throws HC402 where there is no GPU.
int64_t FreeGpuBytes(const Library& library);

// The plan of the largest budget of at most so many bytes of GPU memory. Throws HC558 where there is none.
const Plan& ChooseWithin(const Program& program, uint64_t gpu_memory_bytes, const std::string& folder);

// The plan of the largest budget whose arena the GPU has room for, else the smallest.
const Plan& ChooseFitting(const Program& program, int64_t free_bytes);

}  // namespace hybridc
