#include "system/architectures.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

namespace hybridc {
namespace {

struct Architecture {
  int number;   // 80 of sm_80
  char suffix;  // 'a' of sm_90a, else 0
};

Architecture ParseArchitecture(const std::string& name) {
  const size_t digits = name.find_first_of("0123456789");
  if (name.rfind("sm_", 0) != 0 || digits != 3) return {0, 'a'};  // which no GPU runs
  const size_t end = name.find_first_not_of("0123456789", digits);
  return {std::atoi(name.c_str() + digits), end == std::string::npos ? '\0' : name[end]};
}

bool Loads(Architecture made_for, bool is_ptx, int number) {
  if (made_for.suffix == 'a') return number == made_for.number;
  const bool same_major = number / 10 == made_for.number / 10;
  return number >= made_for.number && (same_major || (is_ptx && made_for.suffix == '\0'));
}

}  // namespace

bool RunsOn(const std::vector<std::string>& architectures, int major, int minor) {
  std::vector<Architecture> parsed;
  std::transform(architectures.begin(), architectures.end(), std::back_inserter(parsed), ParseArchitecture);
  if (parsed.empty()) return false;
  const int number = major * 10 + minor;
  const auto is_older = [](Architecture one, Architecture other) { return one.number < other.number; };
  if (Loads(*std::min_element(parsed.begin(), parsed.end(), is_older), true, number)) return true;
  return std::any_of(parsed.begin(), parsed.end(), [&](Architecture each) { return Loads(each, false, number); });
}

}  // namespace hybridc
