#include "runner/npy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "refusal.h"

namespace hybridc {
namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr size_t kMagicBytes = 6;
constexpr size_t kHeaderAlignment = 64;
constexpr size_t kLargestHeaderBytes = 1 << 16;

// What numpy calls a type in a file, and by name.
constexpr std::array<std::pair<const char*, const char*>, 14> kTypes = {{{"<f4", "float32"},
                                                                         {"<f8", "float64"},
                                                                         {"<f2", "float16"},
                                                                         {"<i8", "int64"},
                                                                         {"<i4", "int32"},
                                                                         {"<i2", "int16"},
                                                                         {"|i1", "int8"},
                                                                         {"<u8", "uint64"},
                                                                         {"<u4", "uint32"},
                                                                         {"<u2", "uint16"},
                                                                         {"|u1", "uint8"},
                                                                         {"|b1", "bool"},
                                                                         {"<V2", "void16"},
                                                                         {"<V1", "void8"}}};

[[noreturn]] void Refuse(const std::string& path, const std::string& what) {
  throw Refusal("HC530", what, path, "write it by numpy.save");
}

// What stands behind a key of the header, a literal of Python's: {'descr': '<f4', 'fortran_order': False, ...}.
std::string ValueOf(const std::string& path, const std::string& header, const std::string& key) {
  const size_t at = header.find("'" + key + "':");
  if (at == std::string::npos) Refuse(path, "its header has no " + key);
  const size_t begin = header.find_first_not_of(' ', at + key.size() + 3);
  if (begin == std::string::npos) Refuse(path, "its header has no " + key);
  const size_t end = header[begin] == '(' ? header.find(')', begin) : header.find_first_of(",}", begin);
  if (end == std::string::npos) Refuse(path, "its header ends too early");
  return header.substr(begin, end - begin);
}

std::string TypeName(const std::string& path, std::string text) {
  std::erase(text, '\'');
  if (text.size() > 1 && text[1] == 'V') text[0] = '<';
  for (const auto& [code, name] : kTypes) {
    if (text == code) return name;
  }
  if (text.starts_with('>')) Refuse(path, "its numbers are big-endian");
  Refuse(path, "it has elements of type " + text);
}

std::vector<int64_t> ParseShape(const std::string& path, const std::string& text) {
  std::vector<int64_t> shape;
  for (size_t at = 0; (at = text.find_first_of("0123456789", at)) != std::string::npos;) {
    size_t length = 0;
    try {
      shape.push_back(std::stoll(text.substr(at), &length));
    } catch (const std::out_of_range&) {
      Refuse(path, "its shape is too large");
    }
    at += length;
  }
  return shape;
}

int64_t BitsOf(const std::string& dtype) {
  if (dtype == "bool") return 8;
  return std::stoll(dtype.substr(dtype.find_first_of("0123456789")));
}

// How an output's type is written.
std::string CodeOf(const std::string& dtype) {
  for (const auto& [code, name] : kTypes) {
    if (dtype == name) return code;
  }
  return "|u1";
}

std::vector<float> Widened(const void* data, size_t size_bytes) {
  std::vector<float> wide(size_bytes / 2);
  for (size_t i = 0; i < wide.size(); ++i) {
    uint16_t half;
    std::memcpy(&half, static_cast<const char*>(data) + 2 * i, sizeof half);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    std::memcpy(&wide[i], &bits, sizeof bits);
  }
  return wide;
}

std::string Header(const std::string& code, const int64_t* shape, size_t rank) {
  std::string text = "{'descr': '" + code + "', 'fortran_order': False, 'shape': (";
  for (size_t axis = 0; axis < rank; ++axis)
    text += std::to_string(shape[axis]) + (rank == 1 || axis + 1 < rank ? "," : "") + (axis + 1 < rank ? " " : "");
  text += "), }";
  const size_t before = kMagicBytes + 4;  // with the version and the header's size
  text.append(kHeaderAlignment - (before + text.size() + 1) % kHeaderAlignment, ' ');
  text += '\n';
  std::string header(kMagic, kMagicBytes);
  header += {'\x01', '\x00', static_cast<char>(text.size() & 0xff), static_cast<char>(text.size() >> 8)};
  return header + text;
}

}  // namespace

Array ParseNpy(const std::string& path, std::string_view content) {
  if (content.size() < 12 || content.compare(0, kMagicBytes, kMagic) != 0) Refuse(path, "it is no .npy file");
  const bool is_long = content[6] > 1;  // versions 2 and 3 have four bytes for the header's size
  const size_t size_bytes = is_long ? 4 : 2, begin = 8 + size_bytes;
  size_t header_bytes = 0;
  for (size_t i = 0; i < size_bytes; ++i) header_bytes |= size_t{static_cast<unsigned char>(content[8 + i])} << 8 * i;
  if (header_bytes > kLargestHeaderBytes || begin + header_bytes > content.size())
    Refuse(path, "its header is cut off");
  const std::string header(content.substr(begin, header_bytes));
  Array array{TypeName(path, ValueOf(path, header, "descr")), ParseShape(path, ValueOf(path, header, "shape")), {}};
  if (ValueOf(path, header, "fortran_order") != "False" && array.shape.size() > 1) {
    Refuse(path, "its elements are in column-major order");
  }
  const size_t left = content.size() - begin - header_bytes;
  int64_t expected = BitsOf(array.dtype) / 8;
  for (int64_t extent : array.shape) {
    if (__builtin_mul_overflow(expected, extent, &expected)) Refuse(path, "its shape is too large");
  }
  if (static_cast<size_t>(expected) != left) {
    Refuse(path, "its shape needs " + std::to_string(expected) + " bytes, but there are " + std::to_string(left));
  }
  array.data.assign(content.end() - static_cast<int64_t>(left), content.end());
  return array;
}

std::string EncodeNpy(const std::string& dtype, const int64_t* shape, size_t rank, const void* data,
                      size_t size_bytes) {
  if (dtype != "bfloat16") {
    return Header(CodeOf(dtype), shape, rank).append(static_cast<const char*>(data), size_bytes);
  }
  const std::vector<float> wide = Widened(data, size_bytes);
  return Header("<f4", shape, rank).append(reinterpret_cast<const char*>(wide.data()), wide.size() * sizeof(float));
}

}  // namespace hybridc
