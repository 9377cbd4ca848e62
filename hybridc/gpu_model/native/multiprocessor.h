// What Python hands over: a kernel's instructions, the steps of its trace, and the multiprocessor's speeds.

#pragma once

#include <cstdint>

namespace gpu_model {

constexpr int partitions = 4;
constexpr int scoreboards = 8;  // the last means none and is never waited for

// Units of a partition, in the order of `Unit` in units.py; then what has no unit of its own.
enum Unit : int { fp32, fma, alu, half, tensor, sfu, fp64, shared, global, copy, none };
constexpr int unit_kinds = none + 1;

enum Flag : int { barrier = 1, branch = 2, store = 4, local = 8, commit = 16, await = 32, bypass = 64 };

struct Instruction {
    int32_t unit;
    int32_t cycles;   // that it holds its unit
    int32_t latency;  // until its result is there, beyond what `stall` covers
    int32_t stall;
    int32_t write_scoreboard;
    int32_t read_scoreboard;
    int32_t waits_for;
    int32_t bank_cycles;  // lost to registers that share a bank
    int32_t flags;
    int32_t groups;  // of copies that `await` lets remain
};

struct Trace {
    int32_t warps;
    int32_t warps_of_block;
    int32_t steps;
    int32_t loop_end;  // instruction that ends a turn of the loop that was cut, or -1
    int32_t kept_turns;
    const Instruction *code;
    const int32_t *step_instruction;
    const uint64_t *step_warps;    // bit w: warp w is there
    const int32_t *step_access;    // row of `lsu_cycles`, or -1
    const double *lsu_cycles;      // rows of `warps`
    const int64_t *sector_starts;  // rows of `warps`, and one more value at the end
    const int64_t *sectors;
};

struct Multiprocessor {
    int32_t fp32_pipes;
    int32_t l1_lines;
    double shared_latency;
    double l1_latency;
    double miss_latency;
    double l2_cycles_per_sector;
    double queue_cycles;   // of accesses that wait for the load/store unit
    double branch_cycles;  // that a taken jump costs
};

struct Outcome {
    double cycles;
    double busy[unit_kinds];  // cycles of a partition, or of the one load/store unit
    double l2_sectors;        // that L1 does not have
};

}  // namespace gpu_model
