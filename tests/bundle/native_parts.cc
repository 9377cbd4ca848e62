// Answers questions that it reads, one a line, for tests that hold the runtime's functions against Python's.
#include <iostream>
#include <sstream>

#include "refusal.h"
#include "system/architectures.cc"
#include "system/host.cc"
#include "system/staging.cc"

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "flags") {
      std::vector<std::string> flags;
      for (std::string flag; words >> flag;) flags.push_back(flag);
      for (const std::string& missing : hybridc::MissingCpuFlags(flags)) std::cout << missing << ' ';
    } else if (what == "runs_on") {
      int major, minor;
      words >> major >> minor;
      std::vector<std::string> architectures;
      for (std::string name; words >> name;) architectures.push_back(name);
      std::cout << hybridc::RunsOn(architectures, major, minor);
    } else if (what == "staging") {
      int64_t arena, limit, available;
      words >> arena >> limit >> available;
      std::vector<int64_t> sizes;
      for (int64_t size; words >> size;) sizes.push_back(size);
      try {
        const hybridc::Staging staging = hybridc::ChooseStaging(sizes, arena, limit, available);
        std::cout << staging.size_bytes << ' ' << staging.slot_count;
      } catch (const hybridc::Refusal& refusal) {
        std::cout << "HC" << refusal.number();
      }
    }
    std::cout << '\n';
  }
}
