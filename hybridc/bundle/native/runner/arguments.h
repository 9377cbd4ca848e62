// The command line of the runner.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hybridc {

struct Arguments {
  std::string folder;                         // of the bundle; empty: that of the runner itself
  std::map<std::string, std::string> inputs;  // files by the names of inputs
  bool is_random = false, is_help = false, is_json = false, lists_ports = false, trusts_weights = false;
  uint64_t seed = 0;
  std::string archive;  // .npz file with inputs; empty: none
  std::string trace;   // file; empty: none is written
  std::string output;  // folder or .npz file; empty: outputs are not written
  int32_t threads = 0;
  uint64_t gpu_memory_bytes = 0, host_memory_bytes = 0;
  int64_t repeat = 1;
};

extern const char kHelp[];

// Throws HC500, HC510, HC513 or HC533 for what it cannot read.
Arguments ParseArguments(int count, char** words);

// Bytes for people.
std::string FormatBytes(uint64_t size_bytes);

}  // namespace hybridc
