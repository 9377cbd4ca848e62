// What this computer has: instructions, cores, memory. Needs no /proc, which an empty root may lack.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace hybridc {

// Those of these flags of /proc/cpuinfo that the processor, or the system on it, lacks.
std::vector<std::string> MissingCpuFlags(const std::vector<std::string>& flags);

// Asks Linux for AMX's tile registers, which it gives only who asks. Throws HC410 where it refuses.
void EnableTiles();

// Cores that this process may use.
int AvailableThreads();

// Memory that can be had without swapping, as the kernel estimates it.
int64_t AvailableHostBytes();

// Likewise with swapping.
int64_t HostRoomBytes();

}  // namespace hybridc
