// When every kernel and copy of a run takes place. `simulate.py` is the reference: the same operations on
// floating-point numbers in the same order, so that times agree to the last bit.

#pragma once

#include <algorithm>

#include "state.h"

namespace planner {

constexpr int LOOKAHEAD = 16;  // as in simulate.py

// One run of a feasible state.
class Run {
  public:
    explicit Run(const Problem &problem) : p(problem), on_host_us_(p.tensors), arrival_us_(p.gaps_count) {}

    // The makespan; NEVER if it is certain to exceed `limit_us`.
    double simulate(const State &state, double limit_us);

    int64_t peak_bytes() const {
        int64_t most = 0;
        for (int64_t load : load_bytes_) most = std::max(most, load);
        return most;
    }

  private:
    struct Fetch {
        int slot, gap, tensor, last_slot;
        int previous, next;  // in the list of those not issued yet
    };
    struct Pending {
        double end_us;
        int64_t size_bytes;
    };

    enum Lane { GPU, CPU, H2D, D2H, LANES };
    struct Settled {
        double start_us, end_us;
        Shares shares;  // of a kernel
    };

    const Problem &p;
    const State *state_ = nullptr;
    double gpu_free_us_, cpu_free_us_, h2d_free_us_, d2h_free_us_;
    double gpu_left_us_, cpu_left_us_, h2d_left_us_;  // work that is still to come
    vector<double> on_host_us_, arrival_us_;
    vector<int64_t> load_bytes_;
    vector<Fetch> fetches_;  // entry 0 is the list's head
    vector<int> cpu_kernels_, own_;
    size_t next_cpu_;
    vector<Pending> pending_, pending_from_now_;
    vector<Settled> settled_[LANES];
    size_t running_[LANES][LANES];  // of the other lane the first that may still be running, seen from a lane

    void start(const State &state);
    double settle(Lane lane, const Shares *own, double start_us, double us);
    void run_cpu_kernels();
    void run_gpu_kernel(int kernel);
    void end_window();
    double when_room(double time_us, int64_t room_bytes) const;
    void prefetch(int slot, double since_us);
    int first_ready(int slot, double time_us) const;
    void fetch_for(int kernel);
    bool fill_idle(int slot, double since_us, double until_us);
    bool fits(const Fetch &fetch, int slot) const;
    void issue(int number, int slot, double start_us);

    int64_t room_bytes(const Fetch &fetch, int slot) const {
        return p.budget_bytes - load_bytes_[slot] - p.size_bytes[fetch.tensor];
    }
    bool exceeds(double limit_us) const {
        return gpu_free_us_ + gpu_left_us_ > limit_us || cpu_free_us_ + cpu_left_us_ > limit_us ||
               h2d_free_us_ + h2d_left_us_ > limit_us;
    }
};

inline double Run::simulate(const State &state, double limit_us) {
    start(state);
    int slot = -1;
    double since_us = 0;
    run_cpu_kernels();
    for (int kernel = 0; kernel < p.kernels; kernel++) {
        if (state.on_cpu[kernel]) continue;
        if (slot >= 0) {
            prefetch(slot, since_us);
            since_us = gpu_free_us_;
        }
        end_window();
        fetch_for(kernel);
        run_gpu_kernel(kernel);
        run_cpu_kernels();
        slot = kernel;
        if (exceeds(limit_us)) return NEVER;
    }
    return std::max(std::max(gpu_free_us_, cpu_free_us_), std::max(h2d_free_us_, d2h_free_us_));
}

inline void Run::start(const State &state) {
    state_ = &state;
    gpu_free_us_ = cpu_free_us_ = h2d_free_us_ = d2h_free_us_ = 0;
    gpu_left_us_ = cpu_left_us_ = h2d_left_us_ = 0;
    for (int t = 0; t < p.tensors; t++) on_host_us_[t] = p.producer[t] < 0 ? 0 : NEVER;
    std::fill(arrival_us_.begin(), arrival_us_.end(), 0.0);
    load_bytes_ = state.load_bytes;
    pending_.clear();
    pending_from_now_.clear();
    for (vector<Settled> &settled : settled_) settled.clear();
    std::fill(&running_[0][0], &running_[0][0] + LANES * LANES, 0);
    cpu_kernels_.clear();
    next_cpu_ = 0;
    fetches_.assign(1, Fetch{p.kernels, -1, -1, p.kernels, 0, 0});
    for (int k = 0; k < p.kernels; k++) {
        if (state.is_off(k)) continue;
        if (state.on_cpu[k]) {
            cpu_kernels_.push_back(k);
            cpu_left_us_ += p.cpu_us[k];
            continue;
        }
        gpu_left_us_ += p.gpu_us[k];
        for (int gap : p.gaps_into[k]) {
            if (state.fetched_after[gap] == NOT_FETCHED) continue;
            const int number = int(fetches_.size()), tensor = p.gaps[gap].tensor;
            fetches_.back().next = number;
            fetches_.push_back({k, gap, tensor, state.fetched_after[gap], number - 1, 0});
            h2d_left_us_ += p.h2d_us[tensor];
        }
    }
    fetches_[0].previous = int(fetches_.size()) - 1;
}

// When a kernel ends, or a copy, which has no shares of its own.
inline double Run::settle(Lane lane, const Shares *own, double start_us, double us) {
    static constexpr Lane PARTNERS[LANES][3] = {{H2D, D2H}, {H2D, D2H}, {GPU, CPU, D2H}, {GPU, CPU, H2D}};
    if (!p.is_shared || (own && own->h2d == 1 && own->d2h == 1)) return start_us + us;
    const int partners = own ? 2 : 3;
    double now_us = start_us, left_us = us, rate;
    while (true) {
        double until_us = NEVER;
        rate = 1;
        for (int i = 0; i < partners; i++) {
            const Lane other = PARTNERS[lane][i];
            const vector<Settled> &settled = settled_[other];
            size_t &at = running_[lane][other];
            while (at < settled.size() && settled[at].end_us <= now_us) at++;
            if (at == settled.size()) continue;
            const Settled &x = settled[at];
            if (x.start_us > now_us) {
                until_us = std::min(until_us, x.start_us);
                continue;
            }
            until_us = std::min(until_us, x.end_us);
            if (own)
                rate *= other == H2D ? own->h2d : own->d2h;
            else
                rate *= other >= H2D ? p.link_share : lane == H2D ? x.shares.h2d : x.shares.d2h;
        }
        if (left_us <= (until_us - now_us) * rate) break;
        left_us -= (until_us - now_us) * rate;
        now_us = until_us;
    }
    const double end_us = now_us + left_us / rate;
    settled_[lane].push_back({start_us, end_us, own ? *own : Shares{1, 1}});
    return end_us;
}

inline void Run::run_cpu_kernels() {
    for (; next_cpu_ < cpu_kernels_.size(); next_cpu_++) {
        const int kernel = cpu_kernels_[next_cpu_];
        double start_us = cpu_free_us_;
        for (int t : p.inputs[kernel]) start_us = std::max(start_us, on_host_us_[t]);
        if (start_us == NEVER) return;
        cpu_free_us_ = settle(CPU, &p.cpu_shares[kernel], start_us, p.cpu_us[kernel]);
        cpu_left_us_ -= p.cpu_us[kernel];
        for (int t : p.outputs[kernel]) on_host_us_[t] = cpu_free_us_;
    }
}

inline void Run::run_gpu_kernel(int kernel) {
    double start_us = gpu_free_us_;
    for (int gap : p.gaps_into[kernel]) start_us = std::max(start_us, arrival_us_[gap]);
    if (p.is_repeat[kernel])
        for (int t : p.outputs[kernel])
            if (state_->offloaded[t]) start_us = std::max(start_us, on_host_us_[t]);
    start_us = when_room(start_us, p.budget_bytes - load_bytes_[kernel]);
    const double end_us = gpu_free_us_ = settle(GPU, &p.gpu_shares[kernel], start_us, p.gpu_us[kernel]);
    gpu_left_us_ -= p.gpu_us[kernel];
    for (int t : p.outputs[kernel])
        if (state_->offloaded[t] && !p.is_repeat[kernel])
            on_host_us_[t] = d2h_free_us_ = settle(D2H, nullptr, std::max(d2h_free_us_, end_us), p.d2h_us[t]);
    auto leave = [&](int t) {
        if (state_->offloaded[t] && on_host_us_[t] > end_us)
            pending_from_now_.push_back({on_host_us_[t], p.size_bytes[t]});
    };
    for (int gap : p.gaps_into[kernel])
        if (state_->leaves[gap]) leave(p.gaps[gap].tensor);
    for (int t : p.outputs[kernel])
        if (state_->born_leaving[t]) leave(t);
}

inline void Run::end_window() {
    pending_.insert(pending_.end(), pending_from_now_.begin(), pending_from_now_.end());
    pending_from_now_.clear();
    std::erase_if(pending_, [&](const Pending &x) { return x.end_us <= gpu_free_us_; });
}

inline double Run::when_room(double time_us, int64_t room_bytes) const {
    while (true) {
        int64_t taken_bytes = 0;
        double next_us = NEVER;
        for (const Pending &x : pending_)
            if (x.end_us > time_us) taken_bytes += x.size_bytes, next_us = std::min(next_us, x.end_us);
        if (taken_bytes <= room_bytes || next_us == NEVER) return time_us;
        time_us = next_us;
    }
}

inline void Run::prefetch(int slot, double since_us) {
    const double until_us = gpu_free_us_;
    while (true) {
        const int number = first_ready(slot, std::max(h2d_free_us_, since_us));
        if (number == 0) return;
        const Fetch &fetch = fetches_[number];
        double start_us = std::max(std::max(h2d_free_us_, since_us), on_host_us_[fetch.tensor]);
        if (start_us >= until_us || !fits(fetch, slot)) return;
        start_us = when_room(start_us, room_bytes(fetch, slot));
        if (start_us >= until_us) return;
        issue(number, slot, start_us);
    }
}

// The number of a fetch, or 0.
inline int Run::first_ready(int slot, double time_us) const {
    int best = 0, seen = 0;
    double best_us = NEVER;
    for (int number = fetches_[0].next; number && seen < LOOKAHEAD; number = fetches_[number].next, seen++) {
        const Fetch &fetch = fetches_[number];
        if (fetch.last_slot >= slot) continue;
        if (on_host_us_[fetch.tensor] <= time_us) return number;
        if (on_host_us_[fetch.tensor] < best_us) best = number, best_us = on_host_us_[fetch.tensor];
    }
    return best;
}

inline void Run::fetch_for(int kernel) {
    const double since_us = gpu_free_us_;
    auto ready_us = [&](int number) { return on_host_us_[fetches_[number].tensor]; };
    own_.clear();
    for (int number = fetches_[0].next; fetches_[number].slot == kernel; number = fetches_[number].next)
        own_.push_back(number);
    std::stable_sort(own_.begin(), own_.end(), [&](int a, int b) { return ready_us(a) < ready_us(b); });
    for (int number : own_) {
        const auto idle = [&] { return std::max(h2d_free_us_, since_us) < ready_us(number); };
        while (idle() && fill_idle(kernel, since_us, ready_us(number))) {
        }
        const double start_us = std::max(std::max(h2d_free_us_, since_us), ready_us(number));
        issue(number, kernel, when_room(start_us, p.budget_bytes - load_bytes_[kernel]));
    }
}

inline bool Run::fill_idle(int slot, double since_us, double until_us) {
    int seen = 0;
    for (int number = fetches_[0].next; number && seen < LOOKAHEAD; number = fetches_[number].next, seen++) {
        const Fetch &fetch = fetches_[number];
        if (fetch.last_slot >= slot || fetch.slot == slot) continue;
        double start_us = std::max(std::max(h2d_free_us_, since_us), on_host_us_[fetch.tensor]);
        const double latest_us = until_us - 0.5 * p.h2d_us[fetch.tensor];
        if (start_us > latest_us) continue;
        if (!fits(fetch, slot)) return false;
        start_us = when_room(start_us, room_bytes(fetch, slot));
        if (start_us > latest_us) return false;
        issue(number, slot, start_us);
        return true;
    }
    return false;
}

inline bool Run::fits(const Fetch &fetch, int slot) const {
    const int64_t room_bytes = p.budget_bytes - p.size_bytes[fetch.tensor];
    for (int k = slot; k < fetch.slot; k++)
        if (load_bytes_[k] > room_bytes) return false;
    return true;
}

inline void Run::issue(int number, int slot, double start_us) {
    const Fetch &fetch = fetches_[number];
    h2d_free_us_ = arrival_us_[fetch.gap] = settle(H2D, nullptr, start_us, p.h2d_us[fetch.tensor]);
    h2d_left_us_ -= p.h2d_us[fetch.tensor];
    for (int k = slot; k < fetch.slot; k++) load_bytes_[k] += p.size_bytes[fetch.tensor];
    fetches_[fetch.previous].next = fetch.next;
    fetches_[fetch.next].previous = fetch.previous;
}

}  // namespace planner
