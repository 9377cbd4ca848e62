// What stands in front of the code of the CPU's functions, which takes arguments as they come. The compiler writes an
// entry for each function into the library (codegen/entries.py), and arguments are compared with that first.
#pragma once
#include <alloca.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>

#include "workers.h"

namespace hybridc {

namespace ffi = tvm::ffi;

struct EntryParameter {
  const int64_t* shape;
  int32_t dimension_count;
  DLDataType dtype;
};

struct Entry {
  const char* name;
  TVMFFISafeCallType code;
  const int64_t* numbers;  // what the code takes in front of the arrays
  const EntryParameter* parameters;
  int32_t number_count, parameter_count;
  int32_t part_count;  // of its loops that each thread gets
};
// as codegen/entries.py writes them
static_assert(sizeof(EntryParameter) == 16 && sizeof(Entry) == 48 && sizeof(DLDataType) == 4);

inline std::string Described(DLDataType dtype, const int64_t* shape, int32_t dimension_count) {
  std::ostringstream text;
  text << ffi::DLDataTypeToString(dtype) << '[';
  for (int32_t i = 0; i < dimension_count; ++i) text << (i == 0 ? "" : ", ") << shape[i];
  text << ']';
  return text.str();
}

inline bool IsCompact(const DLTensor& array) {
  int64_t expected = 1;
  for (int32_t i = array.ndim - 1; array.strides != nullptr && i >= 0; --i) {
    if (array.shape[i] != 1 && array.strides[i] != expected) return false;
    expected *= array.shape[i];
  }
  return true;
}

inline bool IsOf(const DLTensor& array, const EntryParameter& parameter) {
  return array.dtype.code == parameter.dtype.code && array.dtype.bits == parameter.dtype.bits &&
         array.dtype.lanes == parameter.dtype.lanes && array.ndim == parameter.dimension_count &&
         std::equal(array.shape, array.shape + array.ndim, parameter.shape);
}

inline void CheckArgument(const Entry& entry, int32_t position, const TVMFFIAny& argument) {
  const DLTensor* array = nullptr;
  if (argument.type_index == kTVMFFITensor) array = TVMFFITensorGetDLTensorPtr(argument.v_obj);
  if (argument.type_index == kTVMFFIDLTensorPtr) array = static_cast<const DLTensor*>(argument.v_ptr);
  if (array == nullptr) TVM_FFI_THROW(TypeError) << entry.name << ": argument " << position << " is no array";
  const EntryParameter& parameter = entry.parameters[position];
  if (!IsOf(*array, parameter)) {
    TVM_FFI_THROW(ValueError) << entry.name << ": argument " << position << " is "
                              << Described(array->dtype, array->shape, array->ndim) << " instead of "
                              << Described(parameter.dtype, parameter.shape, parameter.dimension_count);
  }
  const bool is_empty = std::find(array->shape, array->shape + array->ndim, 0) != array->shape + array->ndim;
  const bool is_there = is_empty || (array->data != nullptr && IsCompact(*array));
  if (array->device.device_type != kDLCPU || array->byte_offset != 0 || !is_there) {
    TVM_FFI_THROW(ValueError) << entry.name << ": argument " << position << " is not one piece of the host's memory";
  }
}

inline void CheckArguments(const Entry& entry, const TVMFFIAny* arguments, int32_t count) {
  if (count != entry.parameter_count) {
    TVM_FFI_THROW(TypeError) << entry.name << " takes " << entry.parameter_count << " arguments, not " << count;
  }
  for (int32_t i = 0; i < count; ++i) CheckArgument(entry, i, arguments[i]);
}

// Behind each function of the CPU. Returns and raises as TVM's functions do.
inline int Enter(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result, const Entry& entry) {
  TVM_FFI_SAFE_CALL_BEGIN();
  CheckArguments(entry, arguments, count);
  const Workers::Divide parts(entry.part_count);
  if (entry.number_count == 0) return entry.code(self, arguments, count, result);
  const int32_t all_count = entry.number_count + count;
  auto* const all = static_cast<TVMFFIAny*>(alloca(all_count * sizeof(TVMFFIAny)));
  for (int32_t i = 0; i < entry.number_count; ++i) {
    all[i] = {};
    all[i].type_index = kTVMFFIInt;
    all[i].v_int64 = entry.numbers[i];
  }
  std::copy_n(arguments, count, all + entry.number_count);
  return entry.code(self, all, all_count, result);
  TVM_FFI_SAFE_CALL_END();
}

}  // namespace hybridc
