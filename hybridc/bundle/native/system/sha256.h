// SHA-256 (FIPS 180-4), by the processor's own instructions where it has them: weights are read through at load.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace hybridc {

class Sha256 {
 public:
  void Add(const void* data, size_t size);

  // 64 hexadecimal digits. Nothing may be added afterwards.
  std::string Digest();

 private:
  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  unsigned char block_[64];
  uint64_t size_ = 0;
};

}  // namespace hybridc
