// Arrays in files of numpy's format .npy ("NEP 1": A Simple File Format for NumPy Arrays).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace hybridc {

struct Array {
  std::string dtype;  // numpy's name; of types that numpy has not, "void" and the bits of an element: "void16"
  std::vector<int64_t> shape;
  std::vector<char> data;  // elements in row-major order, little-endian
};

// Throws HC530 for a file that is missing or no such file, or has elements in another order.
Array ReadNpy(const std::string& path);

// Writes a file. Types that numpy has not become float32 (bfloat16) or codes in uint8. Throws HC531.
void WriteNpy(const std::string& path, const std::string& dtype, const int64_t* shape, size_t rank, const void* data,
              size_t size_bytes);

}  // namespace hybridc
