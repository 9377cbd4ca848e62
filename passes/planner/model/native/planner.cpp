// The planner's inner loop, for Python. A search holds one problem and its state; several may work at once,
// each in its thread.

#include "search.h"
#include "tidy.h"

using std::int64_t;
using std::uint64_t;
using std::uint8_t;
using planner::ProblemData;
using planner::Search;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void *planner_new(const ProblemData *data) { return new Search(*data); }

EXPORT void planner_free(void *search) { delete static_cast<Search *>(search); }

// Makespan, or infinity if the bytes exceed the budget; and peak bytes, without fetches ahead if so.
EXPORT double planner_makespan_us(void *search, const uint8_t *on_cpu, const uint8_t *keep,
                                  int64_t *peak_bytes) {
    return static_cast<Search *>(search)->evaluate(on_cpu, keep, peak_bytes);
}

// Changes the decisions until they are feasible; 0 if that cannot be.
EXPORT int planner_repair(void *search, uint8_t *on_cpu, uint8_t *keep, uint64_t seed) {
    return static_cast<Search *>(search)->repair(on_cpu, keep, seed);
}

// Changes the decisions to the best found, and returns their makespan; infinity if none is feasible.
EXPORT double planner_anneal(void *search, uint8_t *on_cpu, uint8_t *keep, int64_t evaluations,
                             uint64_t seed, double enough_us, double least_us) {
    return static_cast<Search *>(search)->anneal(on_cpu, keep, evaluations, seed, enough_us, least_us);
}

// Changes the decisions to ones that run and copy less, no slower than the limit, and returns their makespan;
// infinity if the given ones are not feasible.
EXPORT double planner_tidy(void *search, uint8_t *on_cpu, uint8_t *keep, double limit_us) {
    return static_cast<Search *>(search)->tidy(on_cpu, keep, limit_us);
}
