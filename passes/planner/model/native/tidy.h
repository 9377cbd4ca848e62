// Fewer runs and copies in hardly more time: of plans that are as fast a search returns any.

#pragma once

#include <numeric>

#include "search.h"

namespace planner {

inline double Search::tidy(uint8_t *on_cpu, uint8_t *keep, double limit_us) {
    state_.assign(on_cpu, keep);
    if (state_.overload() >= 0 || state_.overloads_host()) return NEVER;
    double now_us = run_.simulate(state_, NEVER);
    int64_t now_bytes = copied_bytes();
    auto attempt = [&](int64_t most_bytes) {
        state_.refresh();
        const bool fits = !changes_.empty() && state_.overload() < 0 && !state_.overloads_host() &&
                          copied_bytes() <= most_bytes;
        const double next_us = fits ? run_.simulate(state_, limit_us) : NEVER;
        if (next_us <= limit_us)
            now_us = next_us, now_bytes = copied_bytes();
        else
            revert(0);
        changes_.clear();
    };
    changes_.clear();
    for (int kernel : p.repeats) {
        if (state_.is_off(kernel)) continue;
        stop_repeat(kernel);
        attempt(now_bytes);
        if (state_.is_off(kernel)) continue;
        stop_repeat(kernel);
        for (int gap : p.gaps_into[kernel]) set_keep(gap, true);
        attempt(now_bytes);
    }
    for (int k = 0, end; k < p.kernels; k = end) {
        for (end = k; end < p.kernels && state_.on_cpu[end];) end++;
        if (end > k) move_to_gpu(k, end), attempt(now_bytes - 1);
        end += end == k;
    }
    vector<int> largest(p.tensors);
    std::iota(largest.begin(), largest.end(), 0);
    std::stable_sort(largest.begin(), largest.end(),
                     [&](int a, int b) { return p.size_bytes[a] > p.size_bytes[b]; });
    for (int t : largest) {
        if (keep_fetched(t)) attempt(now_bytes - 1);
        for (int g = p.first_gap[t]; g < p.first_gap[t + 1]; g++) {
            const int since = state_.fetched_after[g];
            if (since < 0) continue;  // not fetched, or not on the GPU before
            for (int i = g; i >= p.first_gap[t] && p.gaps[i].start >= since; i--) set_keep(i, true);
            attempt(now_bytes - 1);
        }
    }
    write(on_cpu, keep);
    return now_us;
}

// All gaps of a tensor that is fetched; of a weight that pins it.
inline bool Search::keep_fetched(int t) {
    bool fetched = false;
    for (int g = p.first_gap[t]; g < p.first_gap[t + 1]; g++) fetched |= state_.fetched_after[g] != NOT_FETCHED;
    for (int g = p.first_gap[t]; fetched && g < p.first_gap[t + 1]; g++) set_keep(g, true);
    return fetched;
}

// Kernels, with all that they touch kept.
inline void Search::move_to_gpu(int first, int end) {
    for (int k = first; k < end; k++) {
        if (p.is_repeat[k]) continue;
        set_on_cpu(k, false);
        for (int gap : p.gaps_into[k]) set_keep(gap, true);
        for (int t : p.outputs[k])
            for (int g = p.first_gap[t]; g < p.first_gap[t + 1]; g++) set_keep(g, true);
    }
}

inline int64_t Search::copied_bytes() const {
    int64_t bytes = 0;
    for (int t = 0; t < p.tensors; t++) {
        if (state_.offloaded[t]) bytes += p.size_bytes[t];
        for (int g = p.first_gap[t]; g < p.first_gap[t + 1]; g++)
            if (state_.fetched_after[g] != NOT_FETCHED) bytes += p.size_bytes[t];
    }
    return bytes;
}

}  // namespace planner
