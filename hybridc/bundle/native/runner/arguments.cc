#include "runner/arguments.h"

#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "refusal.h"

namespace hybridc {
namespace {

constexpr int64_t kMostThreads = 1 << 12, kMostRuns = 1 << 30;

int64_t ParseCount(const std::string& option, const std::string& text, int64_t least, int64_t most) {
  char* end = nullptr;
  const long long number = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || number < least || number > most) {
    throw Refusal(
        "HC513",
        option + ": " + Quoted(text) + " is no number from " + std::to_string(least) + " to " + std::to_string(most),
        "", "write for example " + option + " 4");
  }
  return number;
}

// 64MiB, 64M and 64m are powers of 1024, 64MB is a power of 1000.
uint64_t ParseBytes(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const double amount = std::strtod(text.c_str(), &end);
  std::string unit = end;
  for (char& c : unit) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const bool is_binary = unit.ends_with("ib") || unit.size() == 1, is_decimal = !is_binary && unit.ends_with("b");
  const size_t power = unit.empty() || unit == "b" ? 0 : std::string("kmgt").find(unit[0]) + 1;
  const size_t unit_length = power == 0 ? unit.size() : unit.ends_with("ib") ? 3 : unit.ends_with("b") ? 2 : 1;
  const double size_bytes = amount * std::pow(is_decimal ? 1000 : 1024, power);
  const bool is_number = end != text.c_str() && size_bytes >= 1 && size_bytes < 0x1p63;
  if (!is_number || power > 4 || unit.size() != unit_length) {
    throw Refusal("HC510", option + ": " + Quoted(text) + " is no amount of memory", "", "write for example 64MiB");
  }
  return static_cast<uint64_t>(size_bytes);
}

void AddInput(Arguments* arguments, const std::string& text) {
  const size_t equals = text.rfind('=');  // names may hold one
  if (equals == std::string::npos || equals == 0 || equals + 1 == text.size()) {
    throw Refusal("HC533", "invalid input " + Quoted(text), "", "write --input NAME=FILE.npy");
  }
  const std::string name = text.substr(0, equals);
  if (!arguments->inputs.emplace(name, text.substr(equals + 1)).second) {
    throw Refusal("HC533", "--input specifies " + Quoted(name) + " more than once", "", "specify it once");
  }
}

}  // namespace

const char kHelp[] = R"(usage: run [FOLDER] [OPTIONS]

Runs the bundle in FOLDER, by default the folder that this program is in.

  --input NAME=FILE.npy  an input and the file of its array; may be repeated
  --inputs FILE.npz      inputs by the names of its arrays, as numpy.savez writes them
  --random               draw inputs without a file at random
  --seed N               seed of --random (default: 0)
  --output DIR|FILE.npz  folder for the outputs, one .npy file each, or one file with all of them
  --ports                print names, types and shapes of inputs and outputs, and do not run
  --threads N            CPU threads (default: as compiled, else one per core)
  --gpu-memory 1GiB      use the plan with the largest budget up to this (default: the GPU's free memory)
  --host-memory 1GiB     limit of the host memory of a run
  --repeat N             number of timed runs (default: 1)
  --trace FILE           run once more, and write what was planned and measured for ui.perfetto.dev
  --trust-weights        do not read all weights to check their hash
  --json                 print one JSON document
  -h, --help             print this

Exit codes: 0 done, 1 internal error, 2 usage error, 3 bundle refused, 4 no plan fits, 5 missing device.
)";

Arguments ParseArguments(int count, char** words) {
  Arguments arguments;
  const std::map<std::string, std::function<void()>> switches = {
      {"--random", [&] { arguments.is_random = true; }},
      {"--ports", [&] { arguments.lists_ports = true; }},
      {"--trust-weights", [&] { arguments.trusts_weights = true; }},
      {"--json", [&] { arguments.is_json = true; }},
      {"--help", [&] { arguments.is_help = true; }},
      {"-h", [&] { arguments.is_help = true; }},
  };
  using Text = const std::string&;
  const std::map<std::string, std::function<void(Text, Text)>> options = {
      {"--input", [&](Text, Text value) { AddInput(&arguments, value); }},
      {"--inputs", [&](Text, Text value) { arguments.archive = value; }},
      {"--seed", [&](Text name, Text value) { arguments.seed = ParseCount(name, value, 0, kMostRuns); }},
      {"--output", [&](Text, Text value) { arguments.output = value; }},
      {"--trace", [&](Text, Text value) { arguments.trace = value; }},
      {"--threads",
       [&](Text name, Text value) {
         arguments.threads = static_cast<int32_t>(ParseCount(name, value, 1, kMostThreads));
       }},
      {"--gpu-memory", [&](Text name, Text value) { arguments.gpu_memory_bytes = ParseBytes(name, value); }},
      {"--host-memory", [&](Text name, Text value) { arguments.host_memory_bytes = ParseBytes(name, value); }},
      {"--repeat", [&](Text name, Text value) { arguments.repeat = ParseCount(name, value, 1, kMostRuns); }},
  };
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i], name = word.substr(0, word.find('='));
    if (switches.contains(word)) {
      switches.at(word)();
    } else if (options.contains(name)) {
      const bool is_joined = name.size() < word.size();
      if (!is_joined && i + 1 == count) throw Refusal("HC500", name + " expects a value", "", "see run --help");
      options.at(name)(name, is_joined ? word.substr(name.size() + 1) : words[++i]);
    } else if (word.starts_with("-") || !arguments.folder.empty()) {
      throw Refusal("HC500", "unknown argument " + Quoted(word), "", "see run --help");
    } else {
      arguments.folder = word;
    }
  }
  return arguments;
}

std::string FormatBytes(uint64_t size_bytes) {
  if (size_bytes < 1024) return std::to_string(size_bytes) + " B";
  double scaled = static_cast<double>(size_bytes) / 1024;
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; scaled >= 1023.95 && unit < 3; ++unit) scaled /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, "%.*f %s", scaled < 9.995 ? 2 : 1, scaled, units[unit]);
  return text;
}

}  // namespace hybridc
