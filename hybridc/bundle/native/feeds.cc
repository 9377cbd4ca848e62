#include "feeds.h"

#include <algorithm>
#include <cstring>

#include "refusal.h"

namespace hybridc {
namespace {

std::string ShapeText(const int64_t* shape, size_t rank) {
  std::string text;
  for (size_t axis = 0; axis < rank; ++axis) text += (axis == 0 ? "" : ", ") + std::to_string(shape[axis]);
  return "[" + text + "]";
}

std::string Finding(const ValueCheck& check, int64_t value) {
  if (check.kind == CheckKind::kDivisor) return "the divisor is " + std::to_string(value);
  if (check.kind == CheckKind::kTrips) return "has not ended within its bound of " + std::to_string(check.upper) + " trips";
  return "index " + std::to_string(value) + " is outside of [" + std::to_string(check.lower) + ", " +
         std::to_string(check.upper) + "]";
}

template <typename Integer>
void CheckIntegers(const ValueCheck& check, const Port& port, const void* data) {
  const int64_t count = port.size_bytes / port.element_bytes;
  for (int64_t i = 0; i < count; ++i) {
    Integer value;
    std::memcpy(&value, static_cast<const char*>(data) + i * static_cast<int64_t>(sizeof value), sizeof value);
    if (static_cast<int64_t>(value) < check.lower || static_cast<int64_t>(value) > check.upper) {
      RefuseValue(check, static_cast<int64_t>(value));
    }
  }
}

}  // namespace

std::string TypeOf(const Port& port) { return port.dtype + ShapeText(port.shape.data(), port.shape.size()); }

void CheckArray(const Port& port, const hybridc_input_array& array) {
  if (array.dtype == nullptr || port.dtype != array.dtype) {
    const std::string found = array.dtype == nullptr ? "no dtype" : std::string("dtype ") + array.dtype;
    throw Refusal("HC553", "input " + Quoted(port.name) + " has " + found, "", "feed " + TypeOf(port));
  }
  if (array.rank != port.shape.size() || (array.rank > 0 && array.shape == nullptr) ||
      !std::equal(port.shape.begin(), port.shape.end(), array.shape)) {
    const std::string found = array.shape == nullptr ? "no shape" : "shape " + ShapeText(array.shape, array.rank);
    throw Refusal("HC554", "input " + Quoted(port.name) + " has " + found, "", "feed " + TypeOf(port));
  }
  if (array.data == nullptr && port.size_bytes > 0) {
    throw Refusal("HC553", "input " + Quoted(port.name) + " has no data", "", "feed " + TypeOf(port));
  }
}

void CheckValues(const ValueCheck& check, const Port& port, const void* data) {
  if (port.dtype == "int64") return CheckIntegers<int64_t>(check, port, data);
  if (port.dtype == "int32") return CheckIntegers<int32_t>(check, port, data);
  if (port.dtype == "int16") return CheckIntegers<int16_t>(check, port, data);
  if (port.dtype == "int8") return CheckIntegers<int8_t>(check, port, data);
  if (port.dtype == "uint64") return CheckIntegers<uint64_t>(check, port, data);
  if (port.dtype == "uint32") return CheckIntegers<uint32_t>(check, port, data);
  if (port.dtype == "uint16") return CheckIntegers<uint16_t>(check, port, data);
  if (port.dtype == "uint8") return CheckIntegers<uint8_t>(check, port, data);
}

void RefuseValue(const ValueCheck& check, int64_t value) {
  const bool is_loop = check.kind == CheckKind::kTrips;
  throw Refusal(is_loop ? "HC586" : "HC560", check.op + " " + Quoted(check.node) + ": " + Finding(check, value), "",
                is_loop ? "compile the model with a larger --bound" : "feed values that the node allows");
}

}  // namespace hybridc
