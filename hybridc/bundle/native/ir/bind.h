// A plan and what its functions are called with -> what each lane really does, as hybridc/ir/bind.py has it.
#pragma once
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ir/plan.h"
#include "program/program.h"

namespace hybridc::ir {

// An array that a function is called with.
struct Parameter {
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t layout;  // of a weight: 0 as the model has it, else how it is packed
  int64_t size_bytes;
};

// By the function's name and the device.
using Signatures = std::map<std::pair<std::string, Device>, std::vector<Parameter>>;

// A weight as the functions of one device read it: tensor, layout, type and shape.
using WeightKey = std::tuple<std::string, int64_t, std::string, std::vector<int64_t>>;

// Where weights lie in their file.
using WeightOffsets = std::map<WeightKey, int64_t>;

// `plan` must have passed `Verify`; the rest may be anything. Afterwards every array is within the buffer that the plan
// reserved for what it shows. Throws HC306 where a function or weight is missing, or is called with more than that.
hybridc::Plan Bind(const Graph& graph, const Plan& plan, const Signatures& signatures, const WeightOffsets& weights);

}  // namespace hybridc::ir
