// Arrays of bytes: where they begin, how many there are, and that arithmetic about them is right.
#pragma once
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace hybridc {

namespace ffi = tvm::ffi;

inline void Check(bool holds, const char* what) {
  if (!holds) TVM_FFI_THROW(ValueError) << what;
}

inline char* Bytes(const ffi::Tensor& array) {
  return static_cast<char*>(array.data_ptr()) + array.byte_offset();
}

// Python's None is taken for an array, too.
inline void CheckIsThere(const ffi::Tensor& array) { Check(array.defined(), "there is no array"); }

inline int64_t SizeBytes(const ffi::Tensor& array) {
  return static_cast<int64_t>(ffi::GetDataSize(array.numel(), array.dtype()));
}

// Bytes of an array that nobody has made yet. Zeros count as ones: strides are products of the other extents.
inline int64_t CheckedSizeBytes(const ffi::Shape& shape, DLDataType dtype) {
  int64_t bits = int64_t{dtype.bits} * dtype.lanes;
  bool is_empty = false, overflows = false;
  for (int64_t extent : shape) {
    Check(extent >= 0, "an extent of an array is negative");
    is_empty |= extent == 0;
    overflows |= __builtin_mul_overflow(bits, std::max<int64_t>(extent, 1), &bits);
  }
  Check(!overflows && bits <= std::numeric_limits<int64_t>::max() - 7, "an array has too many elements");
  return is_empty ? 0 : (bits + 7) / 8;
}

inline void CheckDevice(const ffi::Tensor& array, DLDeviceType device) {
  CheckIsThere(array);
  Check(array.device().device_type == device && array.IsContiguous(), "an array is not where its lane works");
}

inline void CheckSameSize(const ffi::Tensor& source, const ffi::Tensor& target) {
  CheckIsThere(source);
  CheckIsThere(target);
  Check(SizeBytes(source) == SizeBytes(target), "a copy's source and target differ in size");
}

}  // namespace hybridc
