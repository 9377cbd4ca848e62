#include "counting/accesses.h"

#include <algorithm>

#include "memory.h"

namespace emulator {
namespace {

constexpr uintptr_t kSectorBytes = 32, kWordBytes = 4, kBanks = 32, kHalfBytes = 2;

uint64_t divide_up(uint64_t value, uint64_t divisor) { return (value + divisor - 1) / divisor; }

// Distinct values of pieces of `piece_bytes` that accesses of `bytes` touch; sorted.
std::vector<uintptr_t> pieces_of(const uintptr_t* addresses, size_t lanes, unsigned bytes, uintptr_t piece_bytes) {
  std::vector<uintptr_t> pieces;
  for (size_t i = 0; i < lanes; ++i)
    for (uintptr_t piece = addresses[i] / piece_bytes; piece <= (addresses[i] + bytes - 1) / piece_bytes; ++piece)
      pieces.push_back(piece);
  std::sort(pieces.begin(), pieces.end());
  pieces.erase(std::unique(pieces.begin(), pieces.end()), pieces.end());
  return pieces;
}

}  // namespace

void AccessCounts::add(const AccessCounts& other) {
  read_sectors += other.read_sectors;
  least_read_sectors += other.least_read_sectors;
  written_sectors += other.written_sectors;
  least_written_sectors += other.least_written_sectors;
  wavefronts += other.wavefronts;
  least_wavefronts += other.least_wavefronts;
}

void AccessLog::begin(const void* shared, size_t shared_bytes) {
  counts_ = {};
  sites_.clear();
  shared_ = reinterpret_cast<uintptr_t>(shared);
  shared_end_ = shared_ + shared_bytes;
}

void AccessLog::note(unsigned thread, const void* address, unsigned bytes, bool is_write, const void* site) {
  const unsigned warp = thread / kLanes, lane = thread % kLanes;
  if (warp >= sites_.size()) sites_.resize(warp + 1);
  if (thread >= last_.size()) last_.resize(thread + 1);
  Site& found = sites_[warp].try_emplace(site, Site{bytes, is_write, {}, {}}).first->second;
  if (joins_last(thread, reinterpret_cast<uintptr_t>(address), bytes, is_write, found)) return;
  const uint32_t turn = found.turns[lane]++;
  if (turn >= found.accesses.size()) found.accesses.resize(turn + 1);
  WarpAccess& access = found.accesses[turn];
  access.addresses[lane] = reinterpret_cast<uintptr_t>(address);
  access.lanes |= 1u << lane;
}

// Turns of one place in the code, such as a loop over halves, are accesses of their own.
bool AccessLog::joins_last(unsigned thread, uintptr_t address, unsigned bytes, bool is_write, Site& site) {
  Last& last = last_[thread][is_write];
  const bool joins = bytes == kHalfBytes && address == last.end && address % (2 * kHalfBytes) == kHalfBytes &&
                     last.site != nullptr && last.site != &site && last.site->bytes <= 2 * kHalfBytes;
  if (joins) last.site->bytes = 2 * kHalfBytes;
  last = {joins ? nullptr : &site, address + bytes};
  return joins;
}

void AccessLog::settle() {
  last_.clear();
  for (auto& sites : sites_) {
    for (const auto& [place, site] : sites)
      for (const WarpAccess& access : site.accesses) count(site, access);
    sites.clear();
  }
}

// Addresses that are neither are the thread's own: arrays on its stack, which a GPU has in registers.
void AccessLog::count(const Site& site, const WarpAccess& access) {
  std::array<uintptr_t, kLanes> addresses;
  size_t lanes = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane)
    if (access.lanes >> lane & 1) addresses[lanes++] = access.addresses[lane];
  if (addresses[0] >= shared_ && addresses[0] < shared_end_)
    count_shared(site, addresses.data(), lanes);
  else if (is_device_memory(reinterpret_cast<const void*>(addresses[0]), site.bytes))
    count_global(site, addresses.data(), lanes);
}

void AccessLog::count_global(const Site& site, const uintptr_t* addresses, size_t lanes) {
  const uint64_t sectors = pieces_of(addresses, lanes, site.bytes, kSectorBytes).size();
  const uint64_t distinct = pieces_of(addresses, lanes, 1, 1).size();
  const uint64_t least = divide_up(distinct * site.bytes, kSectorBytes);
  (site.is_write ? counts_.written_sectors : counts_.read_sectors) += sectors;
  (site.is_write ? counts_.least_written_sectors : counts_.least_read_sectors) += least;
}

// A bank gives one word a cycle, to all lanes that want the same word (CUDA C++ programming guide, "Shared
// memory").
void AccessLog::count_shared(const Site& site, const uintptr_t* addresses, size_t lanes) {
  const std::vector<uintptr_t> words = pieces_of(addresses, lanes, site.bytes, kWordBytes);
  std::array<uint64_t, kBanks> of_bank{};
  for (uintptr_t word : words) ++of_bank[word % kBanks];
  counts_.wavefronts += *std::max_element(of_bank.begin(), of_bank.end());
  counts_.least_wavefronts += divide_up(words.size(), kBanks);
}

}  // namespace emulator
