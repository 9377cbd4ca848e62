// What a run is fed, held against what the program expects.
#pragma once
#include <string>

#include "hybridc.h"
#include "program/program.h"

namespace hybridc {

// Such as "float32[1, 3, 224, 224]".
std::string TypeOf(const Port& port);

// Throws HC553 for another type of elements, or none at all; HC554 for another shape.
void CheckArray(const Port& port, const hybridc_input_array& array);

// Throws HC560 where an element is outside of what a kernel allows that reads it.
void CheckValues(const ValueCheck& check, const Port& port, const void* data);

// Throws HC560, for a value that a node does not allow.
[[noreturn]] void RefuseValue(const ValueCheck& check, int64_t value);

}  // namespace hybridc
