// What is decided about, as flat arrays. Times are in microseconds; -1 is the event before all kernels.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace planner {

using std::int64_t;
using std::uint64_t;
using std::uint8_t;
using std::vector;

constexpr double NEVER = std::numeric_limits<double>::infinity();
constexpr int64_t UNLIMITED = std::numeric_limits<int64_t>::max();

// What Python hands over; `core.py` declares the same fields.
struct ProblemData {
    int kernels, tensors;
    int64_t budget_bytes, host_bytes;
    const double *gpu_us, *cpu_us, *h2d_us, *d2h_us;
    const double *gpu_shares, *cpu_shares;  // of each kernel beside a fetch and beside an offload
    double link_share;
    uint8_t is_shared;
    const int64_t *workspace_bytes, *cpu_workspace_bytes, *size_bytes;
    const uint8_t *is_weight, *wanted_on_host, *is_repeat;
    const int *input_starts, *inputs, *output_starts, *outputs;
    const int *overwrite_starts, *overwrites;  // (output, input) pairs, two entries each
};

// Rows of different lengths, one after the other.
struct Rows {
    vector<int> starts, values;

    struct Row {
        const int *first, *last;
        const int *begin() const { return first; }
        const int *end() const { return last; }
        int size() const { return int(last - first); }
    };
    Row operator[](int row) const { return {values.data() + starts[row], values.data() + starts[row + 1]}; }

    static Rows copy(int rows, const int *starts, const int *values) {
        return {vector<int>(starts, starts + rows + 1), vector<int>(values, values + starts[rows])};
    }
};

struct Gap {
    int tensor, start, end;
    bool ends_anew;  // the kernel at its end makes the tensor again
};

// What of its speed a kernel keeps, or a copy, that is settled while the other one runs; `contention.py`.
struct Shares {
    double h2d, d2h;
};

struct Problem {
    int kernels, tensors, gaps_count;
    int64_t budget_bytes, host_bytes;
    vector<double> gpu_us, cpu_us, h2d_us, d2h_us;
    vector<Shares> gpu_shares, cpu_shares;
    double link_share;  // of copies in both directions
    bool is_shared;     // whether any share is less than one
    vector<int64_t> size_bytes, working_set_bytes, cpu_workspace_bytes;
    vector<uint8_t> is_weight, wanted_on_host;
    vector<uint8_t> is_repeat;  // runs on the GPU or, "on the CPU", not at all
    vector<int> repeats;
    vector<int> producer;
    Rows inputs, outputs, overwrites;
    vector<Gap> gaps;       // by tensor, then time
    vector<int> first_gap;  // of each tensor; one more entry at the end
    Rows gaps_into;         // gaps that end at a kernel, by number
    Rows overwritten_gaps;  // for each pair of `overwrites` the gap of its input, at the place of the pair

    explicit Problem(const ProblemData &data);

    bool must_run_on_cpu(int kernel) const { return gpu_us[kernel] == NEVER && cpu_us[kernel] < NEVER; }
    bool must_run_on_gpu(int kernel) const { return cpu_us[kernel] == NEVER; }
};

inline Problem::Problem(const ProblemData &d)
    : kernels(d.kernels), tensors(d.tensors), budget_bytes(d.budget_bytes), host_bytes(d.host_bytes),
      gpu_us(d.gpu_us, d.gpu_us + kernels), cpu_us(d.cpu_us, d.cpu_us + kernels),
      h2d_us(d.h2d_us, d.h2d_us + tensors), d2h_us(d.d2h_us, d.d2h_us + tensors),
      link_share(d.link_share), is_shared(d.is_shared),
      size_bytes(d.size_bytes, d.size_bytes + tensors),
      working_set_bytes(d.workspace_bytes, d.workspace_bytes + kernels),
      cpu_workspace_bytes(d.cpu_workspace_bytes, d.cpu_workspace_bytes + kernels),
      is_weight(d.is_weight, d.is_weight + tensors),
      wanted_on_host(d.wanted_on_host, d.wanted_on_host + tensors),
      is_repeat(d.is_repeat, d.is_repeat + kernels),
      producer(tensors, -1), inputs(Rows::copy(kernels, d.input_starts, d.inputs)),
      outputs(Rows::copy(kernels, d.output_starts, d.outputs)),
      overwrites(Rows::copy(kernels, d.overwrite_starts, d.overwrites)), first_gap{0} {
    for (int k = 0; k < kernels; k++) {
        gpu_shares.push_back({d.gpu_shares[2 * k], d.gpu_shares[2 * k + 1]});
        cpu_shares.push_back({d.cpu_shares[2 * k], d.cpu_shares[2 * k + 1]});
    }
    vector<vector<int>> uses(tensors), into(kernels);
    for (int k = 0; k < kernels; k++) {
        if (is_repeat[k]) repeats.push_back(k);
        for (int t : outputs[k]) {
            working_set_bytes[k] += size_bytes[t];
            if (is_repeat[k])
                uses[t].push_back(k);
            else
                producer[t] = k;
        }
        for (int t : inputs[k]) uses[t].push_back(k), working_set_bytes[k] += size_bytes[t];
    }
    for (int t = 0; t < tensors; t++) {
        int start = producer[t];
        for (int use : uses[t]) {
            into[use].push_back(int(gaps.size()));
            const auto made = outputs[use];
            gaps.push_back({t, start, use, std::find(made.begin(), made.end(), t) != made.end()});
            start = use;
        }
        first_gap.push_back(int(gaps.size()));
    }
    gaps_count = int(gaps.size());
    gaps_into.starts = {0};
    overwritten_gaps = overwrites;
    for (int k = 0; k < kernels; k++) {
        gaps_into.values.insert(gaps_into.values.end(), into[k].begin(), into[k].end());
        gaps_into.starts.push_back(int(gaps_into.values.size()));
        for (int i = overwrites.starts[k]; i < overwrites.starts[k + 1]; i += 2)
            for (int gap : into[k])
                if (gaps[gap].tensor == overwrites.values[i + 1]) overwritten_gaps.values[i + 1] = gap;
    }
}

}  // namespace planner
