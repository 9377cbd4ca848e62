// Arrays as files of numpy's format .npy ("NEP 1": A Simple File Format for NumPy Arrays).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hybridc {

struct Array {
  std::string dtype;  // numpy's name; of types that numpy has not, "void" and the bits of an element: "void16"
  std::vector<int64_t> shape;
  std::vector<char> data;  // elements in row-major order, little-endian
};

// The array of a file that has these bytes; `where` is for messages. Throws HC530 for what is no such file, and for
// elements in another order.
Array ParseNpy(const std::string& where, std::string_view content);

// The bytes of a file. Types that numpy has not become float32 (bfloat16) or codes in uint8.
std::string EncodeNpy(const std::string& dtype, const int64_t* shape, size_t rank, const void* data, size_t size_bytes);

}  // namespace hybridc
