// Runs the warps of one multiprocessor step by step: four schedulers that issue one instruction a cycle each,
// the units they share, scoreboards, barriers, and a load/store unit in front of L1 and L2.

#include <algorithm>
#include <cmath>
#include <vector>

#include "l1.h"
#include "multiprocessor.h"

namespace gpu_model {
namespace {

constexpr double never = 1e30;
constexpr int reads_operands = 4;   // cycles from an access's turn until its registers may be overwritten
constexpr int barrier_cycles = 4;

struct Warp {
    std::vector<int32_t> steps;
    size_t place = 0;
    double ready = 0;
    double scoreboard[scoreboards] = {};
    std::vector<double> copies;  // when each committed group of copies has arrived
    double copying = 0;          // the same for what is not committed yet
    int turns = 0;
};

class Simulation {
public:
    Simulation(const Trace &trace, const Multiprocessor &machine, Outcome &outcome, double *marks)
        : trace_(trace), machine_(machine), outcome_(outcome), marks_(marks), l1_(machine.l1_lines),
          warps_(trace.warps), arrived_(trace.warps / trace.warps_of_block) {
        for (int step = 0; step < trace.steps; ++step)
            for (int w = 0; w < trace.warps; ++w)
                if (trace.step_warps[step] >> w & 1) warps_[w].steps.push_back(step);
        for (int w = trace.warps - 1; w >= 0; --w) partition_[w % partitions].push_back(w);
        for (Warp &warp : warps_)
            if (warp.steps.empty()) warp.ready = never;
    }

    // Returns how many turns of the loop were marked.
    int run() {
        for (int p = 0; p < partitions; ++p) next_[p] = following(p);
        for (;;) {
            const int p = static_cast<int>(std::min_element(next_, next_ + partitions) - next_);
            if (next_[p] >= never) break;
            issue(p, next_[p]);
        }
        return marked_;
    }

private:
    double following(int p) const {
        double least = never;
        for (int w : partition_[p]) least = std::min(least, warps_[w].ready);
        return least >= never ? never : std::max(free_[p], least);
    }

    // The warp that went on last goes on, else the youngest that can.
    int chosen(int p, double now) const {
        if (last_[p] >= 0 && warps_[last_[p]].ready <= now) return last_[p];
        for (int w : partition_[p])
            if (warps_[w].ready <= now) return w;
        return -1;
    }

    double *pipe_of(int unit, int p) {
        if (unit == fp32 && machine_.fp32_pipes > 1)
            return fma_free_[p] <= second_free_[p] ? &fma_free_[p] : &second_free_[p];
        if (unit == fp32 || unit == fma) return &fma_free_[p];
        return unit < shared ? &unit_free_[unit][p] : nullptr;
    }

    void issue(int p, double now) {
        const int w = chosen(p, now);
        Warp &warp = warps_[w];
        const int step = warp.steps[warp.place];
        const int index = trace_.step_instruction[step];
        const Instruction &instruction = trace_.code[index];
        double *pipe = pipe_of(instruction.unit, p);
        const bool accesses = instruction.unit >= shared && instruction.unit != none;
        const double hold = pipe ? *pipe : accesses ? lsu_free_ - machine_.queue_cycles : 0;
        if (hold > now) {
            warp.ready = hold;
            next_[p] = following(p);
            return;
        }
        double done = now + instruction.latency;
        if (pipe) {
            *pipe = now + instruction.cycles + instruction.bank_cycles;
            const bool two = instruction.unit == fp32 && machine_.fp32_pipes > 1;
            outcome_.busy[instruction.unit] += instruction.cycles / (two ? 2.0 : 1.0) / partitions;
        } else if (accesses) {
            done = access(warp, w, step, instruction, now);
        }
        if (instruction.flags & commit) {
            warp.copies.push_back(warp.copying);
            warp.copying = 0;
        }
        warp.scoreboard[instruction.write_scoreboard] = done;
        free_[p] = now + 1 + (instruction.unit == fp32 ? 0 : instruction.bank_cycles);
        last_[p] = w;
        outcome_.cycles = std::max({outcome_.cycles, now, done});
        if (index == trace_.loop_end && warp.turns < trace_.kept_turns) {
            ++warp.turns;
            marks_[marked_++] = now;
        }
        advance(warp, w, p, index, instruction, now + std::max(1, instruction.stall));
    }

    void advance(Warp &warp, int w, int p, int index, const Instruction &instruction, double time) {
        ++warp.place;
        const bool more = warp.place < warp.steps.size();
        if (more) {
            const int next = trace_.step_instruction[warp.steps[warp.place]];
            if ((instruction.flags & branch) && next != index + 1) time += machine_.branch_cycles;
            const Instruction &following = trace_.code[next];
            for (int s = 0; s < 6; ++s)
                if (following.waits_for >> s & 1) time = std::max(time, warp.scoreboard[s]);
        }
        if (instruction.flags & await) time = std::max(time, copies_arrived(warp, instruction.groups));
        warp.ready = more ? time : never;
        if (instruction.flags & barrier) {
            meet(w, time, more);
            for (int q = 0; q < partitions; ++q) next_[q] = following(q);
        } else {
            next_[p] = following(p);
        }
    }

    static double copies_arrived(const Warp &warp, int remaining) {
        double time = 0;
        for (size_t group = 0; group + remaining < warp.copies.size(); ++group)
            time = std::max(time, warp.copies[group]);
        return time;
    }

    // All warps of a block wait for each other.
    void meet(int w, double time, bool more) {
        const int block = w / trace_.warps_of_block, first = block * trace_.warps_of_block;
        std::vector<double> &times = arrived_[block];
        times.push_back(time);
        if (more) warps_[w].ready = never;
        if (static_cast<int>(times.size()) < trace_.warps_of_block) return;
        const double all = *std::max_element(times.begin(), times.end()) + barrier_cycles;
        times.clear();
        for (int v = first; v < first + trace_.warps_of_block; ++v)
            warps_[v].ready = warps_[v].place < warps_[v].steps.size() ? all : never;
    }

    double access(Warp &warp, int w, int step, const Instruction &instruction, double now) {
        const int row = trace_.step_access[step];
        const double cycles = row < 0 ? instruction.cycles : trace_.lsu_cycles[row * trace_.warps + w];
        const double start = std::max(lsu_free_, now);
        double done = start + cycles + (instruction.unit == shared ? machine_.shared_latency : machine_.l1_latency);
        if (row >= 0 && instruction.unit != shared) {
            const int64_t *bounds = trace_.sector_starts + static_cast<int64_t>(row) * trace_.warps + w;
            for (int64_t k = bounds[0]; k < bounds[1]; ++k)
                done = std::max(done, sector(trace_.sectors[k], instruction.flags, start));
        }
        lsu_free_ = start + cycles;
        outcome_.busy[instruction.unit] += cycles;
        warp.scoreboard[instruction.read_scoreboard] = lsu_free_ + reads_operands;
        if (instruction.unit == copy) warp.copying = std::max(warp.copying, done);
        return done;
    }

    // When one sector has come or gone. Stores go on to L2 and are not waited for.
    double sector(int64_t number, int flags, double start) {
        const bool stores = flags & store, keeps = !(flags & bypass) && !(stores && !(flags & local));
        double *ready = keeps ? &l1_.at(number) : nullptr;
        if (!stores && ready && *ready < L1::absent) return *ready;
        l2_free_ = std::max(l2_free_, start) + machine_.l2_cycles_per_sector;
        outcome_.l2_sectors += 1;
        if (stores) {
            if (ready) *ready = start;
            return start;
        }
        const double arrives = l2_free_ + machine_.miss_latency;
        if (ready) *ready = arrives;
        return arrives;
    }

    const Trace &trace_;
    const Multiprocessor &machine_;
    Outcome &outcome_;
    double *marks_;
    int marked_ = 0;
    L1 l1_;
    std::vector<Warp> warps_;
    std::vector<std::vector<double>> arrived_;
    std::vector<int> partition_[partitions];  // its warps, the youngest first
    double next_[partitions] = {}, free_[partitions] = {};
    int last_[partitions] = {-1, -1, -1, -1};
    double fma_free_[partitions] = {}, second_free_[partitions] = {};
    double unit_free_[unit_kinds][partitions] = {};
    double lsu_free_ = 0, l2_free_ = 0;
};

}  // namespace
}  // namespace gpu_model

// Fills in the outcome and `marks`, the times at which a warp ended a turn of the loop; returns their number.
extern "C" __attribute__((visibility("default"))) int gpu_model_simulate(const gpu_model::Trace *trace,
                                                                         const gpu_model::Multiprocessor *machine,
                                                                         gpu_model::Outcome *outcome,
                                                                         double *marks) {
    return gpu_model::Simulation(*trace, *machine, *outcome, marks).run();
}
