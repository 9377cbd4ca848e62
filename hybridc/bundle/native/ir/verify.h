// Accepts or refuses a plan, as hybridc/ir/verify.py does: a test holds the two against each other. Shares no code with
// what binds the plan.
#pragma once
#include "ir/plan.h"

namespace hybridc::ir {

// Checks every promise of a plan against the graph. Throws HC306, with the code that hybridc/ir/verify.py has for what
// is wrong (HC210 to HC221, HC224).
void Verify(const Graph& graph, const Plan& plan);

}  // namespace hybridc::ir
