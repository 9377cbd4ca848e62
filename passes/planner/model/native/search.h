// Repair and simulated annealing.

#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "random.h"
#include "run.h"

namespace planner {

// Chosen by measurement: BERT, U-Net, ResNet-152, a training step of ResNet-50, at 10 to 75 % of their peaks.
constexpr int COOLINGS = 4;                  // each begins with the best state so far
constexpr double FIRST_TEMPERATURE = 0.003;  // of the makespan
constexpr int HALVINGS = 5;                  // of the temperature, in each cooling
constexpr int SHORT_CHAIN = 6, LONG_CHAIN = 40;
constexpr int NEARBY = 20;                   // gaps
constexpr int EXCHANGES = 6;                 // one move in so many, if kernels are alike
constexpr int HOST_MOVES = 40;               // per kernel, to make room in the host's memory

class Search {
  public:
    explicit Search(const ProblemData &data)
        : p(data), state_(p), run_(p), kind_(p.kernels), is_protected_(p.gaps_count) {
        find_kinds();
    }
    Search(const Search &) = delete;

    double evaluate(const uint8_t *on_cpu, const uint8_t *keep, int64_t *peak_bytes) {
        state_.assign(on_cpu, keep);
        const bool feasible = state_.overload() < 0 && !state_.overloads_host();
        *peak_bytes = 0;
        for (int64_t load_bytes : state_.load_bytes) *peak_bytes = std::max(*peak_bytes, load_bytes);
        if (!feasible) return NEVER;
        const double makespan_us = run_.simulate(state_, NEVER);
        *peak_bytes = run_.peak_bytes();
        return makespan_us;
    }

    bool repair(uint8_t *on_cpu, uint8_t *keep, uint64_t seed) {
        Random random(seed);
        state_.assign(on_cpu, keep);
        const bool feasible = repair(random) && relieve_host(random);
        write(on_cpu, keep);
        return feasible;
    }

    // Ends early once a makespan of at most `enough_us` is found; takes none that is below `least_us`.
    double anneal(uint8_t *on_cpu, uint8_t *keep, int64_t evaluations, uint64_t seed, double enough_us,
                  double least_us);

    // Runs and copies less as long as the makespan stays within the limit.
    double tidy(uint8_t *on_cpu, uint8_t *keep, double limit_us);

  private:
    struct Change {
        bool is_kernel;
        int index;
    };

    const Problem p;
    State state_;
    Run run_;
    vector<int> kind_;              // per kernel
    vector<vector<int>> alike_;     // per kind: kernels of equal times and bytes
    vector<Change> changes_;        // since the last accepted state
    vector<uint8_t> is_protected_;  // gaps that the present move keeps on purpose
    vector<int> protected_, candidates_;

    bool repair(Random &random);
    bool relieve_host(Random &random);
    void find_candidates(int slot);
    int length(int gap) const;

    bool step(Random &random);
    void move(Random &random);
    void move_kernels(Random &random);
    void move_chain(Random &random);
    void move_repeats(Random &random);
    void find_kinds();
    void exchange(Random &random);
    void exchange_keeps(int one, int other);
    void start_repeat(int kernel);
    void stop_repeat(int kernel);
    void swap_gaps(Random &random);
    void fill(Random &random);

    bool keep_fetched(int tensor);
    void move_to_gpu(int first, int end);
    int64_t copied_bytes() const;

    void revert(size_t changes_left);
    void set_on_cpu(int kernel, bool cpu);
    void set_keep(int gap, bool kept);
    void protect(int gap) {
        gap = state_.decider(gap);
        if (!is_protected_[gap]) is_protected_[gap] = true, protected_.push_back(gap);
    }
    void write(uint8_t *on_cpu, uint8_t *keep) const {
        std::copy(state_.on_cpu.begin(), state_.on_cpu.end(), on_cpu);
        std::copy(state_.held.begin(), state_.held.end(), keep);
    }
};

inline double Search::anneal(uint8_t *on_cpu, uint8_t *keep, int64_t evaluations, uint64_t seed,
                             double enough_us, double least_us) {
    Random random(seed);
    state_.assign(on_cpu, keep);
    if (!repair(random) || !relieve_host(random)) return NEVER;
    double now_us = run_.simulate(state_, NEVER), best_us = now_us;
    write(on_cpu, keep);
    if (p.kernels == 0) return best_us;
    const double first_us = FIRST_TEMPERATURE * now_us;
    const int64_t cooling = evaluations / COOLINGS + 1;
    for (int64_t i = 0; i < evaluations && best_us > enough_us; i++) {
        if (i % cooling == 0) {
            state_.assign(on_cpu, keep);
            now_us = best_us;
        }
        const double halvings = HALVINGS * double(i % cooling) / double(cooling);
        const double whole = std::floor(halvings);
        const double temperature_us = std::ldexp(first_us * (1 - 0.5 * (halvings - whole)), -int(whole));
        changes_.clear();
        const bool feasible = step(random) && !state_.overloads_host();
        if (changes_.empty()) continue;
        // accepted with probability exp(-(next - now) / temperature): drawn first, it bounds the simulation
        const double limit_us = now_us + temperature_us * random.exponential();
        const double next_us = feasible ? run_.simulate(state_, limit_us) : NEVER;
        if (!(next_us <= limit_us && next_us >= least_us)) {
            revert(0);
            continue;
        }
        now_us = next_us;
        if (now_us < best_us) {
            best_us = now_us;
            write(on_cpu, keep);
        }
    }
    return best_us;
}

// A random move, and what it takes to make it feasible, which may fail.
inline bool Search::step(Random &random) {
    move(random);
    const bool feasible = repair(random);
    if (feasible && random.one_in(2)) fill(random);
    for (int gap : protected_) is_protected_[gap] = false;
    protected_.clear();
    return feasible;
}

inline void Search::move(Random &random) {
    const int kind = random.below(10);
    if (!p.repeats.empty() && random.one_in(4)) {
        move_repeats(random);
    } else if (p.gaps_count && int(alike_.size()) < p.kernels && random.one_in(EXCHANGES)) {
        exchange(random);
    } else if (kind < 3 || p.gaps_count == 0) {
        if (p.gaps_count && random.one_in(3))
            move_chain(random);
        else
            move_kernels(random);
    } else if (kind < 7) {
        const int gap = random.below(p.gaps_count);
        set_keep(gap, !state_.keep[state_.decider(gap)]);
        protect(gap);
    } else if (kind < 9) {
        swap_gaps(random);
    } else {
        const int first = random.below(p.gaps_count);
        for (int i = 0; i < NEARBY; i++)
            if (random.one_in(2)) set_keep((first + i) % p.gaps_count, true);
    }
    state_.refresh();
}

// Some kernels in a row to one device: a few, or now and then many.
inline void Search::move_kernels(Random &random) {
    const int first = random.below(p.kernels);
    const int length = 1 + random.below(random.one_in(3) ? 1 + p.kernels / 8 : 4);
    const bool cpu = random.one_in(2);
    for (int k = first; k < std::min(p.kernels, first + length); k++)
        if (!p.is_repeat[k]) set_on_cpu(k, cpu);
}

// Some kernels of which each uses what the one before makes to one device, with what they hand on: bands of a
// tiled network lie side by side in the order.
inline void Search::move_chain(Random &random) {
    const bool cpu = random.one_in(2);
    int kernel = random.below(p.kernels);
    for (int left = 1 + random.below(random.one_in(3) ? LONG_CHAIN : SHORT_CHAIN); left > 0; left--) {
        if (!p.is_repeat[kernel]) set_on_cpu(kernel, cpu);
        const auto made = p.outputs[kernel];
        if (made.size() == 0) return;
        const int tensor = made.first[random.below(made.size())];
        const int gaps = p.first_gap[tensor + 1] - p.first_gap[tensor];
        if (gaps == 0) return;
        const int next = random.below(gaps);
        for (int gap = p.first_gap[tensor]; !cpu && gap <= p.first_gap[tensor] + next; gap++)
            set_keep(gap, true);
        kernel = p.gaps[p.first_gap[tensor] + next].end;
    }
}

// Let some repeats in a row run, or not.
inline void Search::move_repeats(Random &random) {
    const int count = int(p.repeats.size());
    const int first = random.below(count), length = 1 + random.below(random.one_in(3) ? 1 + count / 8 : 4);
    const bool off = !state_.on_cpu[p.repeats[first]];
    for (int i = first; i < std::min(count, first + length); i++)
        if (off)
            stop_repeat(p.repeats[i]);
        else
            start_repeat(p.repeats[i]);
}

// Its result is made for the next use, and its inputs are kept for it where they were for later ones.
inline void Search::start_repeat(int kernel) {
    if (!state_.is_off(kernel)) return;
    int made = -1;
    for (int gap : p.gaps_into[kernel]) {
        if (p.gaps[gap].ends_anew)
            made = gap;
        else if (state_.set_keep(gap, state_.keep[state_.decider(gap)]))
            changes_.push_back({false, gap});
    }
    set_on_cpu(kernel, false);
    set_keep(made + 1, true);
    protect(made + 1);
}

// Its result is not kept instead.
inline void Search::stop_repeat(int kernel) {
    if (state_.is_off(kernel)) return;
    set_on_cpu(kernel, true);
    for (int gap : p.gaps_into[kernel])
        if (p.gaps[gap].ends_anew) set_keep(gap, false);
}

inline void Search::find_kinds() {
    std::map<std::tuple<double, double, int64_t, int>, int> kinds;
    for (int k = 0; k < p.kernels; k++) {
        const std::tuple key(p.gpu_us[k], p.cpu_us[k], p.working_set_bytes[k], p.gaps_into[k].size());
        kind_[k] = kinds.try_emplace(key, int(kinds.size())).first->second;
        alike_.resize(kinds.size());
        alike_[kind_[k]].push_back(k);
    }
}

// What is decided for some kernels in a row, for others that are alike, and the other way round. Layers of a
// network repeat; to change them one by one would lead over runs that are much slower or do not fit.
inline void Search::exchange(Random &random) {
    const int first = random.below(p.kernels);
    const auto &alike = alike_[kind_[first]];
    const int other = alike[random.below(int(alike.size()))];
    const int longest = 1 + random.below(random.one_in(3) ? LONG_CHAIN : SHORT_CHAIN);
    const int length = std::min({longest, std::abs(first - other), p.kernels - std::max(first, other)});
    for (int a = first, b = other; a < first + length && kind_[a] == kind_[b]; a++, b++) {
        if (!p.is_repeat[a] && !p.is_repeat[b]) {
            const bool cpu = state_.on_cpu[a];
            set_on_cpu(a, state_.on_cpu[b]);
            set_on_cpu(b, cpu);
        }
        for (int i = 0; i < p.gaps_into[a].size(); i++)
            exchange_keeps(p.gaps_into[a].first[i], p.gaps_into[b].first[i]);
    }
}

inline void Search::exchange_keeps(int one, int other) {
    const bool kept = state_.keep[state_.decider(one)];
    set_keep(one, state_.keep[state_.decider(other)]);
    set_keep(other, kept);
}

// Keep one gap instead of another, nearby or anywhere.
inline void Search::swap_gaps(Random &random) {
    const int one = random.below(p.gaps_count);
    int other = one;
    for (int i = 0; i < 8 && state_.keep[other] == state_.keep[one]; i++) {
        const int near = one - NEARBY + random.below(2 * NEARBY + 1);
        other = random.one_in(2) ? std::clamp(near, 0, p.gaps_count - 1) : random.below(p.gaps_count);
    }
    exchange_keeps(one, other);
    protect(one);
    protect(other);
}

// Keep some gaps more where there is room.
inline void Search::fill(Random &random) {
    if (p.gaps_count == 0) return;
    for (int tries = 1 + random.below(8); tries > 0; tries--) {
        const int gap = random.below(p.gaps_count);
        if (state_.keep[gap] || state_.on_cpu[p.gaps[gap].end]) continue;
        const size_t before = changes_.size();
        set_keep(gap, true);
        state_.refresh();
        if (state_.overload() >= 0) revert(before);
    }
    state_.overload();
}

// Give up kept gaps at the slot that exceeds the budget most, or move its kernel to the CPU, until all fits.
inline bool Search::repair(Random &random) {
    for (int slot; (slot = state_.overload()) >= 0; state_.refresh()) {
        find_candidates(slot);
        if (candidates_.empty()) {
            if (p.must_run_on_gpu(slot)) return false;
            if (p.is_repeat[slot])
                stop_repeat(slot);
            else
                set_on_cpu(slot, true);
            continue;
        }
        const int count = int(candidates_.size());
        const int one = candidates_[random.below(count)], other = candidates_[random.below(count)];
        const int longer = length(other) > length(one) ? other : one;
        set_keep(is_protected_[longer] ? candidates_[random.below(count)] : longer, false);
    }
    return true;
}

// Random moves that leave no more to the host, until it has room.
inline bool Search::relieve_host(Random &random) {
    int64_t excess_bytes = state_.host_excess_bytes();
    for (int moves = HOST_MOVES * p.kernels; moves > 0 && excess_bytes > 0; moves--) {
        changes_.clear();
        const bool fits = step(random);
        const int64_t next_bytes = fits ? state_.host_excess_bytes() : UNLIMITED;
        if (next_bytes > excess_bytes)
            revert(0);
        else
            excess_bytes = next_bytes;
    }
    changes_.clear();
    return excess_bytes == 0 && state_.overload() < 0;
}

// Gaps that hold bytes at a slot beside its working set; of a pinned weight its first one.
inline void Search::find_candidates(int slot) {
    candidates_.clear();
    for (int t = 0; t < p.tensors; t++) {
        const int first = p.first_gap[t], end = p.first_gap[t + 1];
        bool used = false;
        for (int g = first; g < end; g++) {
            used |= p.gaps[g].end == slot;
            if (!state_.is_pinned(t) && state_.held[g] && p.gaps[g].start < slot && slot < p.gaps[g].end)
                candidates_.push_back(state_.decider(g));
        }
        if (state_.is_pinned(t) && !used) candidates_.push_back(first);
    }
}

// Slots that a gap holds bytes for.
inline int Search::length(int gap) const {
    return state_.is_pinned(p.gaps[gap].tensor) ? p.kernels : p.gaps[gap].end - p.gaps[gap].start;
}

inline void Search::revert(size_t changes_left) {
    for (; changes_.size() > changes_left; changes_.pop_back()) {
        const auto [is_kernel, index] = changes_.back();
        if (is_kernel)
            state_.set_on_cpu(index, !state_.on_cpu[index]);
        else
            state_.set_keep(index, !state_.keep[index]);
    }
    state_.refresh();
}

inline void Search::set_on_cpu(int kernel, bool cpu) {
    if (state_.set_on_cpu(kernel, cpu)) changes_.push_back({true, kernel});
}

// All gaps of a weight where that pins or releases it.
inline void Search::set_keep(int gap, bool kept) {
    const int t = p.gaps[gap].tensor, first_gap = p.first_gap[t];
    const bool whole = p.is_weight[t] && (gap == first_gap || state_.keep[first_gap]);
    gap = state_.decider(gap);
    const int first = whole ? first_gap : gap, end = whole ? p.first_gap[t + 1] : gap + 1;
    for (int g = first; g < end; g++)
        if (state_.set_keep(g, kept)) changes_.push_back({false, g});
}

}  // namespace planner
