// Offsets for blocks of memory with known lifetimes: a complete search for a packing within a capacity.
//
// Time is cut into sections, one for each maximal set of blocks that live together. Of the packings
// within the capacity the search looks for the one of least potential (sum of size^2 * offset), in which
// - every block rests on the ground or on top of another one (a canonical solution in the sense of
//   Moffitt, MiniMalloc, ASPLOS 2023);
// - no block fits into empty bytes below it;
// - of two blocks with one lifetime, the one right on top of the other is no larger.
// Packing goes upwards. Each section has a floor, and each block a lowest offset that is still possible.
// A node of the search takes a section in a valley of the floors and asks which block stands on its
// floor, or whether none does. What no longer has a block in common is solved apart.
//
// Effort is counted in blocks looked at, so that results do not depend on the machine's speed.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max() / 4;

enum class Outcome { kRefuted = 0, kPacked = 1, kGivenUp = 2 };

struct MemoryBlock {
  int64_t size = 0;
  int first = 0;  // sections, both included
  int last = 0;
  int64_t lowest = 0;  // no offset below is possible any more; once it is placed, its offset
  double rank = 0;  // blocks of high rank are tried first
};

struct Section {
  int64_t floor = 0;  // bytes below are taken or given up
  int64_t solid = 0;  // bytes from here to the floor are empty
  int64_t under = -1;  // the block whose end is the floor
  int64_t unplaced_bytes = 0;
  int64_t unplaced = 0;  // so many blocks, the first ones of `blocks`, are not yet placed
  std::vector<int> blocks;
  double weight = 1;  // grows with every failure here: what is hard is decided first
};

class Search {
 public:
  Search(std::vector<MemoryBlock> blocks, int section_count, int64_t capacity)
      : blocks_(std::move(blocks)),
        sections_(section_count),
        is_changed_(section_count),
        capacity_(capacity) {
    for (int i = 0; i < static_cast<int>(blocks_.size()); ++i)
      for (int s = blocks_[i].first; s <= blocks_[i].last; ++s) {
        sections_[s].blocks.push_back(i);
        sections_[s].unplaced += 1;
        sections_[s].unplaced_bytes += blocks_[i].size;
      }
  }

  // Short attempts that differ by noise, each a little longer than the one before: a search that went
  // wrong near its root is soon left (Gomes et al., JAR 24, 2000).
  Outcome Run(int64_t effort) {
    effort_left_ = effort;
    double nodes = static_cast<double>(kFirstAttemptNodes + blocks_.size());
    for (int attempt = 0; effort_left_ > 0; ++attempt, nodes *= kAttemptGrowth) {
      Undo(0);
      RankBlocks(attempt);
      for (Section& section : sections_) section.weight = 1;
      nodes_left_ = static_cast<int64_t>(nodes);
      for (int s = 0; s < static_cast<int>(sections_.size()); ++s) MarkChanged(s);
      if (!Propagate()) return Outcome::kRefuted;
      Outcome outcome = Solve(0, static_cast<int>(sections_.size()) - 1);
      if (outcome != Outcome::kGivenUp) return outcome;
    }
    return Outcome::kGivenUp;
  }

  int64_t offset(int block) const { return blocks_[block].lowest; }

 private:
  static constexpr int64_t kFirstAttemptNodes = 200;
  static constexpr double kAttemptGrowth = 1.03;
  static constexpr double kRankNoise = 0.3;
  static constexpr double kScoreNoise = 0.2;

  struct Change {
    int64_t* where;
    int64_t old_value;
  };

  void Set(int64_t& where, int64_t value) {
    trail_.push_back({&where, where});
    where = value;
  }

  void Undo(size_t length) {
    for (; trail_.size() > length; trail_.pop_back()) *trail_.back().where = trail_.back().old_value;
  }

  double Noise(double width) {  // around 1, from a xorshift generator
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return 1 + width * (static_cast<double>(random_ >> 11) * 0x1p-53 - 0.5);
  }

  // By size; by size times sections, an area; or by what lies between.
  void RankBlocks(int attempt) {
    for (MemoryBlock& block : blocks_) {
      double sections = block.last - block.first + 1;
      double factor[] = {1, sections, std::sqrt(sections)};
      double noise = attempt < 2 ? 1 : Noise(kRankNoise);
      block.rank = noise * static_cast<double>(block.size) * factor[attempt % 3];
    }
  }

  void MarkChanged(int section) {
    if (is_changed_[section]) return;
    is_changed_[section] = 1;
    changed_.push_back(section);
  }

  bool Fail(int section) {
    sections_[section].weight += 1;
    for (int s : changed_) is_changed_[s] = 0;
    changed_.clear();
    raised_.clear();
    return false;
  }

  // Raises lowest offsets to floors and floors to lowest offsets until nothing changes. False if a
  // section's blocks cannot all be stacked within the capacity, or if a block fits in a hole.
  bool Propagate() {
    while (!changed_.empty()) {
      int s = changed_.back();
      changed_.pop_back();
      is_changed_[s] = 0;
      if (!Stack(s)) return Fail(s);
    }
    for (int s : raised_)
      for (int k = 0; k < sections_[s].unplaced; ++k)
        if (FitsInHole(blocks_[sections_[s].blocks[k]])) return Fail(s);
    raised_.clear();
    return true;
  }

  // The blocks of one section, each as soon as its lowest offset allows: no order is shorter, as for
  // jobs with release times on one machine.
  bool Stack(int s) {
    Section& section = sections_[s];
    auto begin = section.blocks.begin();
    effort_left_ -= section.unplaced;
    for (int k = 0; k < section.unplaced; ++k) {
      int i = begin[k];
      if (blocks_[i].lowest < section.floor) RaiseBlock(i, section.floor, s);
      int at = k;
      for (; at > 0 && blocks_[begin[at - 1]].lowest > blocks_[i].lowest; --at) begin[at] = begin[at - 1];
      begin[at] = i;
    }
    if (section.unplaced > 0 && blocks_[begin[0]].lowest > section.floor) {
      Set(section.floor, blocks_[begin[0]].lowest);
      raised_.push_back(s);
    }
    int64_t end = section.floor;
    for (int k = 0; k < section.unplaced; ++k)
      end = std::max(end, blocks_[begin[k]].lowest) + blocks_[begin[k]].size;
    return end <= capacity_;
  }

  void RaiseBlock(int i, int64_t lowest, int except_section = -1) {
    MemoryBlock& block = blocks_[i];
    Set(block.lowest, lowest);
    for (int s = block.first; s <= block.last; ++s)
      if (s != except_section) MarkChanged(s);
  }

  bool FitsInHole(const MemoryBlock& block) const {
    int64_t top = kNever, bottom = 0;
    for (int s = block.first; s <= block.last; ++s) {
      top = std::min(top, sections_[s].floor);
      bottom = std::max(bottom, sections_[s].solid);
      if (top - bottom < block.size) return false;
    }
    return true;
  }

  bool Place(int i) {
    MemoryBlock& block = blocks_[i];
    int64_t end = block.lowest + block.size;
    for (int s = block.first; s <= block.last; ++s) {
      Section& section = sections_[s];
      auto begin = section.blocks.begin(), unplaced = begin + section.unplaced;
      auto found = std::find(begin, unplaced, i);
      std::rotate(found, found + 1, unplaced);
      Set(section.unplaced, section.unplaced - 1);
      Set(section.unplaced_bytes, section.unplaced_bytes - block.size);
      Set(section.floor, end);
      Set(section.solid, end);
      Set(section.under, i);
      MarkChanged(s);
    }
    return Propagate();
  }

  // Sections first..last, which share no unplaced block with others.
  Outcome Solve(int first, int last) {
    std::vector<std::pair<int, int>> parts = Parts(first, last);
    std::sort(parts.begin(), parts.end(), [](auto& one, auto& other) {
      return std::make_pair(one.second - one.first, one.first) <
             std::make_pair(other.second - other.first, other.first);
    });
    for (auto [begin, end] : parts) {
      Outcome outcome = Branch(begin, end);
      if (outcome != Outcome::kPacked) return outcome;
    }
    return Outcome::kPacked;
  }

  // The runs of sections among first..last that unplaced blocks hold together.
  std::vector<std::pair<int, int>> Parts(int first, int last) {
    std::vector<std::pair<int, int>> parts;
    for (int s = first; s <= last; ++s) {
      const Section& section = sections_[s];
      if (section.unplaced == 0) continue;
      if (parts.empty() || parts.back().second < s) parts.push_back({s, s});
      for (int k = 0; k < section.unplaced; ++k)
        parts.back().second = std::max(parts.back().second, blocks_[section.blocks[k]].last);
    }
    return parts;
  }

  // One part: which block stands on the floor of one section? Tries them all, and then that none does.
  Outcome Branch(int first, int last) {
    if (nodes_left_-- <= 0 || effort_left_ <= 0) return Outcome::kGivenUp;
    int s = ChooseSection(first, last);
    std::vector<int> candidates = Candidates(s);
    size_t length = trail_.size();
    for (int i : candidates) {
      if (!IsWorthTrying(i)) continue;
      Outcome outcome = Place(i) ? Solve(first, last) : Outcome::kRefuted;
      if (outcome != Outcome::kRefuted) return outcome;
      Undo(length);
    }
    return LeaveEmpty(s, candidates) ? Solve(first, last) : Outcome::kRefuted;
  }

  // Of the sections in valleys, the one with the fewest alternatives for its weight.
  int ChooseSection(int first, int last) {
    int best = -1;
    double best_score = 0;
    for (int begin = first, end; begin <= last; begin = end) {
      int64_t floor = sections_[begin].floor;
      for (end = begin + 1; end <= last && sections_[end].floor == floor;) ++end;
      bool falls = begin == first || sections_[begin - 1].floor > floor;
      bool rises = end > last || sections_[end].floor > floor;
      if (!falls || !rises) continue;
      for (int s = begin; s < end; ++s) {
        double score = Noise(kScoreNoise) * Alternatives(sections_[s]) / sections_[s].weight;
        if (best < 0 || score < best_score) std::tie(best, best_score) = std::make_pair(s, score);
      }
    }
    return best;
  }

  int Alternatives(const Section& section) {
    bool may_stay_empty = section.floor + section.unplaced_bytes < capacity_;
    int count = may_stay_empty ? 1 : 0;
    effort_left_ -= section.unplaced;
    for (int k = 0; k < section.unplaced; ++k) count += blocks_[section.blocks[k]].lowest == section.floor;
    return count;
  }

  // The unplaced blocks that can stand on the floor of a section in a valley.
  std::vector<int> Candidates(int s) const {
    const Section& section = sections_[s];
    std::vector<int> found;
    for (int k = 0; k < section.unplaced; ++k)
      if (blocks_[section.blocks[k]].lowest == section.floor) found.push_back(section.blocks[k]);
    std::sort(found.begin(), found.end(), [this](int one, int other) {
      return std::make_pair(-blocks_[one].rank, one) < std::make_pair(-blocks_[other].rank, other);
    });
    return found;
  }

  bool IsWorthTrying(int i) const {
    const MemoryBlock& block = blocks_[i];
    const Section& section = sections_[block.first];
    bool rests = false;
    for (int s = block.first; s <= block.last && !rests; ++s) rests = sections_[s].solid == block.lowest;
    if (!rests) return false;
    for (int k = 0; k < section.unplaced; ++k)  // equal blocks are placed in order
      if (section.blocks[k] < i && IsEqual(blocks_[section.blocks[k]], block)) return false;
    if (section.under < 0 || section.solid != block.lowest) return true;
    const MemoryBlock& under = blocks_[section.under];
    return under.first != block.first || under.last != block.last || under.size >= block.size;
  }

  static bool IsEqual(const MemoryBlock& one, const MemoryBlock& other) {
    return one.first == other.first && one.last == other.last && one.size == other.size;
  }

  // None of the candidates stands on the floor of the section: each rests on another block, which is
  // either not in the section or, if it is, not below the lowest of them.
  bool LeaveEmpty(int s, const std::vector<int>& candidates) {
    std::vector<int64_t> lowest;
    for (int i : candidates) {
      lowest.push_back(kNever);
      for (int t = blocks_[i].first; t <= blocks_[i].last; ++t)
        for (int k = 0; k < sections_[t].unplaced; ++k) {
          const MemoryBlock& other = blocks_[sections_[t].blocks[k]];
          if (other.last < s || s < other.first)
            lowest.back() = std::min(lowest.back(), other.lowest + other.size);
        }
    }
    int64_t floor = *std::min_element(lowest.begin(), lowest.end());
    for (int k = 0; k < sections_[s].unplaced; ++k) {
      int64_t other = blocks_[sections_[s].blocks[k]].lowest;
      if (other > sections_[s].floor) floor = std::min(floor, other);
    }
    if (floor == kNever) return Fail(s);
    for (int i : candidates) RaiseBlock(i, floor);
    return Propagate();
  }

  std::vector<MemoryBlock> blocks_;
  std::vector<Section> sections_;
  std::vector<char> is_changed_;
  std::vector<int> changed_;
  std::vector<int> raised_;
  std::vector<Change> trail_;
  int64_t capacity_;
  int64_t nodes_left_ = 0;
  int64_t effort_left_ = 0;
  uint64_t random_ = 88172645463325252u;
};

// The sections of blocks that live from `first` to `last`: a step at which a block begins, if one ends
// before the next such step; all other sets of live blocks are part of one of those.
std::vector<int64_t> SectionSteps(int count, const int64_t* first, const int64_t* last) {
  std::vector<int64_t> begins(first, first + count), ends(last, last + count), steps;
  std::sort(begins.begin(), begins.end());
  begins.erase(std::unique(begins.begin(), begins.end()), begins.end());
  std::sort(ends.begin(), ends.end());
  for (size_t k = 0; k < begins.size(); ++k) {
    auto end = std::lower_bound(ends.begin(), ends.end(), begins[k]);
    if (k + 1 == begins.size() || *end < begins[k + 1]) steps.push_back(begins[k]);
  }
  return steps;
}

}  // namespace

// Writes an offset for each of `count` blocks, which live from step `first` to step `last`, both included,
// so that all end within `capacity`. 1: written; 0: there is no such packing; 2: none found with `effort`.
// Sizes are positive.
extern "C" __attribute__((visibility("default"))) int hybridc_pack(
    int count, const int64_t* size, const int64_t* first, const int64_t* last, int64_t capacity,
    int64_t effort, int64_t* offset) {
  std::vector<int64_t> steps = SectionSteps(count, first, last);
  std::vector<MemoryBlock> blocks(count);
  auto begin = steps.begin(), end = steps.end();
  for (int i = 0; i < count; ++i) {
    blocks[i].size = size[i];
    blocks[i].first = static_cast<int>(std::lower_bound(begin, end, first[i]) - begin);
    blocks[i].last = static_cast<int>(std::upper_bound(begin, end, last[i]) - begin) - 1;
  }
  Search search(std::move(blocks), static_cast<int>(steps.size()), capacity);
  Outcome outcome = search.Run(effort);
  for (int i = 0; i < count; ++i) offset[i] = search.offset(i);
  return static_cast<int>(outcome);
}

// Puts each block, in the given order, into the smallest hole that takes it, or on top of all that it shares
// a step with. Writes offsets; returns the end of the highest block.
extern "C" __attribute__((visibility("default"))) int64_t hybridc_best_fit(
    int count, const int64_t* size, const int64_t* first, const int64_t* last, const int* order,
    int64_t* offset) {
  struct Placed {
    int64_t start, end, first, last;
    bool operator<(const Placed& other) const {
      return start != other.start ? start < other.start : end < other.end;
    }
  };
  std::vector<Placed> placed;  // lowest first
  placed.reserve(count);
  int64_t highest = 0;
  for (int k = 0; k < count; ++k) {
    int i = order[k];
    int64_t top = 0, best = -1, best_hole = kNever;
    for (const Placed& other : placed) {
      if (other.first > last[i] || first[i] > other.last) continue;
      if (other.start - top >= size[i] && other.start - top < best_hole) {
        best = top, best_hole = other.start - top;
      }
      top = std::max(top, other.end);
    }
    offset[i] = best < 0 ? top : best;
    highest = std::max(highest, offset[i] + size[i]);
    Placed own{offset[i], offset[i] + size[i], first[i], last[i]};
    placed.insert(std::upper_bound(placed.begin(), placed.end(), own), own);
  }
  return highest;
}
