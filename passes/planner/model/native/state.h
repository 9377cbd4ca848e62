// Decisions, and when that puts each tensor into the GPU's memory. `residency.py` is the reference.

#pragma once

#include "problem.h"

namespace planner {

constexpr int64_t NOTHING = std::numeric_limits<int64_t>::min() / 4;  // the load of a slot on the CPU
constexpr int NOT_FETCHED = -2;

// Decisions, and what follows for each tensor's stays on the GPU. Kept up to date tensor by tensor, so that
// a small change costs little.
class State {
  public:
    const Problem &p;
    vector<uint8_t> on_cpu, keep;   // the decisions
    vector<uint8_t> held;           // per gap: the tensor stays on the GPU throughout
    vector<uint8_t> leaves;         // per gap: the tensor leaves with the kernel at the end
    vector<uint8_t> born_leaving;   // per tensor: it leaves with the kernel that makes it
    vector<uint8_t> offloaded;      // per tensor: made on the GPU and copied to the host
    vector<int> fetched_after;      // per gap: the last slot before its fetch, or NOT_FETCHED
    vector<int64_t> load_bytes;     // per slot, after `overload`; NOTHING on the CPU

    explicit State(const Problem &problem)
        : p(problem), on_cpu(p.kernels), keep(p.gaps_count), held(p.gaps_count), leaves(p.gaps_count),
          born_leaving(p.tensors), offloaded(p.tensors), fetched_after(p.gaps_count, NOT_FETCHED),
          load_bytes(p.kernels), pinned_(p.tensors), beside_bytes_(p.kernels), is_stale_(p.tensors),
          taken_at_(p.tensors, -1), host_change_bytes_(p.kernels + 1) {}

    void assign(const uint8_t *cpu, const uint8_t *kept) {
        for (int k = 0; k < p.kernels; k++)
            on_cpu[k] = p.must_run_on_cpu(k) || (cpu[k] && !p.must_run_on_gpu(k));
        for (int g = 0; g < p.gaps_count; g++) keep[g] = kept[g] != 0;
        for (int t = 0; t < p.tensors; t++) make_stale(t);
        refresh();
    }

    // Both return whether that is a change; `refresh` must follow.
    bool set_on_cpu(int kernel, bool cpu) {
        const bool forbidden = cpu ? p.must_run_on_gpu(kernel) : p.must_run_on_cpu(kernel);
        if (on_cpu[kernel] == cpu || forbidden) return false;
        on_cpu[kernel] = cpu;
        for (int t : p.inputs[kernel]) make_stale(t);
        for (int t : p.outputs[kernel]) make_stale(t);
        return true;
    }
    bool set_keep(int gap, bool kept) {
        if (keep[gap] == kept) return false;
        keep[gap] = kept;
        make_stale(p.gaps[gap].tensor);
        return true;
    }

    void refresh() {
        for (int t : stale_) {
            is_stale_[t] = false;
            forget(t);
            if (p.is_weight[t] && p.first_gap[t] < p.first_gap[t + 1] && keep[p.first_gap[t]])
                pin(t);
            else
                follow(t);
        }
        stale_.clear();
    }

    // Fills `load_bytes` and returns the slot that exceeds the budget most, or -1.
    int overload() {
        int worst = -1;
        int64_t most = p.budget_bytes;
        for (int k = 0; k < p.kernels; k++) {
            load_bytes[k] = on_cpu[k] ? NOTHING : beside_bytes_[k] + working_set_bytes(k);
            if (load_bytes[k] > most) most = load_bytes[k], worst = k;
        }
        return worst;
    }

    bool overloads_host() { return host_excess_bytes() > 0; }

    // What the host holds beyond what it may, over all kernels; `host_bytes_of` of the reference.
    int64_t host_excess_bytes() {
        if (p.host_bytes == UNLIMITED) return 0;
        std::fill(host_change_bytes_.begin(), host_change_bytes_.end(), 0);
        for (int t = 0; t < p.tensors; t++) {
            const int made = p.producer[t];
            if (p.is_weight[t] || (made >= 0 && !on_cpu[made] && !offloaded[t])) continue;
            int last = p.wanted_on_host[t] ? p.kernels - 1 : made;
            for (int g = p.first_gap[t]; g < p.first_gap[t + 1]; g++) {
                const int end = p.gaps[g].end;
                const bool is_read = on_cpu[end] ? !p.is_repeat[end] : fetched_after[g] != NOT_FETCHED;
                if (is_read) last = std::max(last, end);
            }
            host_change_bytes_[std::max(made, 0)] += p.size_bytes[t];
            host_change_bytes_[last + 1] -= p.size_bytes[t];
        }
        int64_t held_bytes = 0, excess_bytes = 0;
        for (int k = 0; k < p.kernels; k++) {
            held_bytes += host_change_bytes_[k];
            const bool runs = on_cpu[k] && !p.is_repeat[k];
            const int64_t all_bytes = held_bytes + (runs ? p.cpu_workspace_bytes[k] : 0);
            excess_bytes += std::max<int64_t>(0, all_bytes - p.host_bytes);
        }
        return excess_bytes;
    }

    bool is_pinned(int tensor) const { return pinned_[tensor]; }

    // A repeat that does not run: a gap that ends there is kept if the next one is.
    bool is_off(int kernel) const { return p.is_repeat[kernel] && on_cpu[kernel]; }

    // The gap that decides whether a tensor is kept throughout the given one.
    int decider(int gap) const {
        const int last = p.first_gap[p.gaps[gap].tensor + 1] - 1;
        while (gap < last && is_off(p.gaps[gap].end)) gap++;
        return gap;
    }

  private:
    vector<uint8_t> pinned_;
    vector<int64_t> beside_bytes_;  // per kernel: held beside its working set
    vector<int> stale_;
    vector<uint8_t> is_stale_;
    vector<int> taken_at_;          // per tensor: the last kernel at which `working_set_bytes` paired it
    vector<int64_t> host_change_bytes_;  // from one kernel to the next

    void make_stale(int tensor) {
        if (!is_stale_[tensor]) is_stale_[tensor] = true, stale_.push_back(tensor);
    }

    // The slots strictly between two events. At kernels on the CPU among them nobody asks.
    void hold(int64_t bytes, int start, int end) {
        for (int k = start + 1; k < end; k++) beside_bytes_[k] += bytes;
    }

    void forget(int t) {
        int last_use = p.producer[t];
        for (int g = p.first_gap[t]; g < p.first_gap[t + 1]; g++) {
            if (held[g]) hold(-p.size_bytes[t], p.gaps[g].start, p.gaps[g].end);
            held[g] = leaves[g] = false;
            fetched_after[g] = NOT_FETCHED;
            last_use = p.gaps[g].end;
        }
        if (pinned_[t]) hold(-p.size_bytes[t], last_use, p.kernels);
        pinned_[t] = offloaded[t] = born_leaving[t] = false;
    }

    void pin(int t) {
        bool used = false;
        int last_use = -1;
        for (int g = p.first_gap[t]; g < p.first_gap[t + 1]; g++) {
            last_use = p.gaps[g].end;
            used |= !on_cpu[last_use];
        }
        if (!used) return;
        pinned_[t] = true;
        for (int g = p.first_gap[t]; g < p.first_gap[t + 1]; g++) {
            held[g] = true;
            hold(p.size_bytes[t], p.gaps[g].start, p.gaps[g].end);
        }
        hold(p.size_bytes[t], last_use, p.kernels);
    }

    void follow(int t) {
        const int stop = p.first_gap[t + 1];
        const bool made_on_gpu = p.producer[t] >= 0 && !on_cpu[p.producer[t]];
        bool on_gpu = made_on_gpu, needed_on_host = p.wanted_on_host[t];
        int last_slot = made_on_gpu ? p.producer[t] : -1, last_gap = -1;  // -1: the producer
        auto leave = [&] { (last_gap < 0 ? born_leaving[t] : leaves[last_gap]) = true; };
        for (int g = p.first_gap[t]; g < stop;) {
            const int reach = on_gpu ? held_until(g, stop) : -1;
            if (reach >= 0) {
                for (; g <= reach; g++) {
                    needed_on_host |= g < reach && !is_off(p.gaps[g].end);
                    held[g] = true;
                    hold(p.size_bytes[t], p.gaps[g].start, p.gaps[g].end);
                }
                last_slot = p.gaps[reach].end, last_gap = reach;
                continue;
            }
            if (on_gpu) leave();
            const Gap &gap = p.gaps[g];
            needed_on_host |= !gap.ends_anew && !is_off(gap.end);
            on_gpu = !on_cpu[gap.end];
            if (on_gpu && !gap.ends_anew) fetched_after[g] = last_slot;
            if (on_gpu) last_slot = gap.end, last_gap = g;
            g++;
        }
        if (on_gpu) leave();
        offloaded[t] = made_on_gpu && needed_on_host;
    }

    int held_until(int g, int stop) const {
        for (; g < stop; g++) {
            const Gap &gap = p.gaps[g];
            if (!on_cpu[gap.end]) return keep[g] && !gap.ends_anew ? g : -1;
            if (!keep[g] && !is_off(gap.end)) return -1;
        }
        return -1;
    }

    int64_t working_set_bytes(int k) {
        int64_t bytes = p.working_set_bytes[k];
        const auto pairs = p.overwrites[k], gaps = p.overwritten_gaps[k];
        for (int i = 0; i < pairs.size(); i++) taken_at_[pairs.first[i]] = -1;
        for (int i = 0; i < pairs.size(); i += 2) {
            const int output = pairs.first[i], source = pairs.first[i + 1];
            if (!leaves[gaps.first[i + 1]] || offloaded[source]) continue;
            if (taken_at_[output] == k || taken_at_[source] == k) continue;
            taken_at_[output] = taken_at_[source] = k;
            bytes -= p.size_bytes[output];
        }
        return bytes;
    }
};

}  // namespace planner
