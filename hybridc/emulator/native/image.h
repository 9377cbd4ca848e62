// Names a compiled CUDA image by a hash of its bytes. Mirrored by image_key in kernels.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace emulator {

constexpr uint32_t kFatbinMagic = 0xBA55ED50;

template <class T>
T read_at(const void* image, size_t offset) {
  T value;
  std::memcpy(&value, static_cast<const char*>(image) + offset, sizeof value);
  return value;
}

// An image comes without its length. Fat binary: u32 magic, u16 version, u16 header size, u64 size of
// the rest. Cubin: an ELF file that ends with its section or program headers. PTX: text ended by NUL.
inline size_t image_size(const void* image) {
  if (read_at<uint32_t>(image, 0) == kFatbinMagic)
    return read_at<uint16_t>(image, 6) + static_cast<size_t>(read_at<uint64_t>(image, 8));
  if (std::memcmp(image, "\x7f" "ELF", 4) == 0) {
    const size_t programs_end =
        read_at<uint64_t>(image, 32) + size_t{read_at<uint16_t>(image, 54)} * read_at<uint16_t>(image, 56);
    const size_t sections_end =
        read_at<uint64_t>(image, 40) + size_t{read_at<uint16_t>(image, 58)} * read_at<uint16_t>(image, 60);
    return programs_end > sections_end ? programs_end : sections_end;
  }
  return std::strlen(static_cast<const char*>(image));
}

// 64-bit FNV-1a over little-endian 8-byte words, the last one padded with zeros: over bytes, the Python
// twin would take seconds on a large image.
inline uint64_t image_key(const void* image) {
  const size_t size = image_size(image);
  uint64_t hash = 0xCBF29CE484222325u;
  for (size_t offset = 0; offset < size; offset += 8) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const char*>(image) + offset, size - offset < 8 ? size - offset : 8);
    hash = (hash ^ word) * 0x100000001B3u;
  }
  return hash;
}

}  // namespace emulator
