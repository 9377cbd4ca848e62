// Random draws that are the same with every standard library.

#pragma once

#include <cstdint>
#include <random>

namespace planner {

class Random {
  public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}
    int below(int count) { return int((unsigned __int128)(engine_()) * unsigned(count) >> 64); }
    bool one_in(int count) { return below(count) == 0; }
    double uniform() { return double(engine_() >> 11) * 0x1p-53; }

    // Exponentially distributed with mean 1, by comparisons alone (von Neumann 1951).
    double exponential() {
        for (double whole = 0;; whole++) {
            const double first = uniform();
            double last = first;
            bool even = true;
            for (double next = uniform(); next < last; next = uniform()) last = next, even = !even;
            if (even) return whole + first;
        }
    }

  private:
    std::mt19937_64 engine_;
};

}  // namespace planner
