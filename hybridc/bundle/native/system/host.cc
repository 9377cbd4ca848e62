#include "system/host.h"

#include <cpuid.h>
#include <immintrin.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "refusal.h"

namespace hybridc {
namespace {

enum Register { kEax, kEbx, kEcx, kEdx };

// Registers whose contents the system keeps, as XCR0 tells them: SSE and AVX; AVX-512's three; AMX's two.
constexpr uint64_t kVectors = 0x6, kLargeVectors = 0xe6, kTiles = 0x60000;

struct Flag {
  const char* name;
  unsigned leaf, subleaf;
  Register where;
  int bit;
  uint64_t kept;
};

// "CPUID—CPU Identification" in the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2A.
constexpr Flag kFlags[] = {
    {"avx", 1, 0, kEcx, 28, kVectors},
    {"fma", 1, 0, kEcx, 12, kVectors},
    {"f16c", 1, 0, kEcx, 29, kVectors},
    {"avx2", 7, 0, kEbx, 5, kVectors},
    {"bmi1", 7, 0, kEbx, 3, 0},
    {"bmi2", 7, 0, kEbx, 8, 0},
    {"avx_vnni", 7, 1, kEax, 4, kVectors},
    {"avx512f", 7, 0, kEbx, 16, kLargeVectors},
    {"avx512dq", 7, 0, kEbx, 17, kLargeVectors},
    {"avx512cd", 7, 0, kEbx, 28, kLargeVectors},
    {"avx512bw", 7, 0, kEbx, 30, kLargeVectors},
    {"avx512vl", 7, 0, kEbx, 31, kLargeVectors},
    {"avx512_vnni", 7, 0, kEcx, 11, kLargeVectors},
    {"avx512_bf16", 7, 1, kEax, 5, kLargeVectors},
    {"amx_bf16", 7, 0, kEdx, 22, kTiles},
    {"amx_tile", 7, 0, kEdx, 24, kTiles},
    {"amx_int8", 7, 0, kEdx, 25, kTiles},
};

constexpr unsigned kOsSavesRegisters = 1u << 27;  // OSXSAVE, in ECX of leaf 1

__attribute__((target("xsave"))) uint64_t KeptRegisters() {
  unsigned registers[4];
  __cpuid(1, registers[kEax], registers[kEbx], registers[kEcx], registers[kEdx]);
  return registers[kEcx] & kOsSavesRegisters ? _xgetbv(0) : 0;
}

bool HasFlag(const std::string& name, uint64_t kept) {
  for (const Flag& flag : kFlags) {
    if (name != flag.name) continue;
    unsigned registers[4] = {};
    __get_cpuid_count(flag.leaf, flag.subleaf, &registers[kEax], &registers[kEbx], &registers[kEcx], &registers[kEdx]);
    return (registers[flag.where] >> flag.bit & 1) != 0 && (kept & flag.kept) == flag.kept;
  }
  return false;
}

struct Memory {
  int64_t available_bytes, swap_bytes;
};

// As the kernel estimates it where there is /proc, else what nobody uses.
Memory MemoryNow() {
  struct sysinfo info;
  Memory now{0, 0};
  if (sysinfo(&info) == 0) {
    now.available_bytes = static_cast<int64_t>(info.freeram + info.bufferram) * info.mem_unit;
    now.swap_bytes = static_cast<int64_t>(info.freeswap) * info.mem_unit;
  }
  std::ifstream lines("/proc/meminfo");
  std::string name;
  for (int64_t kibibytes; lines >> name >> kibibytes; lines.ignore(64, '\n')) {
    if (name == "MemAvailable:") now.available_bytes = kibibytes << 10;
  }
  return now;
}

}  // namespace

std::vector<std::string> MissingCpuFlags(const std::vector<std::string>& flags) {
  const uint64_t kept = KeptRegisters();
  std::vector<std::string> missing;
  std::copy_if(flags.begin(), flags.end(), std::back_inserter(missing),
               [kept](const std::string& name) { return !HasFlag(name, kept); });
  return missing;
}

void EnableTiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    throw Refusal("HC410", std::string("the system does not allow this process to use AMX: ") + std::strerror(errno),
                  "", "use Linux 5.16 or newer, or compile for --target avx512_bf16");
  }
}

int AvailableThreads() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(CPU_COUNT(&set), 1) : 1;
}

int64_t AvailableHostBytes() { return MemoryNow().available_bytes; }

int64_t HostRoomBytes() {
  const Memory now = MemoryNow();
  return now.available_bytes + now.swap_bytes;
}

}  // namespace hybridc
