#include "system/sha256.h"

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace hybridc {
namespace {

constexpr size_t kBlockBytes = 64;

alignas(16) constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void AddBlocks(uint32_t* state, const unsigned char* data, size_t count) {
  for (; count > 0; --count, data += kBlockBytes) {
    uint32_t words[64];
    std::memcpy(words, data, kBlockBytes);
    for (int i = 0; i < 16; ++i) words[i] = __builtin_bswap32(words[i]);
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = words[i - 15], b = words[i - 2];
      words[i] = words[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) + words[i - 7] +
                 (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
    }
    uint32_t v[8];
    std::copy_n(state, 8, v);
    for (int i = 0; i < 64; ++i) {
      const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]), majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
      const uint32_t first =
          v[7] + (std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25)) + choice + kRounds[i] + words[i];
      const uint32_t second = (std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22)) + majority;
      std::copy_backward(v, v + 7, v + 8);
      v[4] += first;
      v[0] = first + second;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
  }
}

// Two rounds an instruction; the state lies as ABEF and CDGH. "Intel SHA Extensions", Gulley et al., 2013.
__attribute__((target("sha,sse4.1"))) void AddBlocksByInstructions(uint32_t* state, const unsigned char* data,
                                                                   size_t count) {
  const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; count > 0; --count, data += kBlockBytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i words[4];
    for (int i = 0; i < 16; ++i) {
      __m128i& now = words[i % 4];
      if (i < 4) {
        now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), to_big_endian);
      } else {
        const __m128i before = words[(i + 3) % 4], seven_back = _mm_alignr_epi8(before, words[(i + 2) % 4], 4);
        now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, words[(i + 1) % 4]), seven_back), before);
      }
      const __m128i sums = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRounds) + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sums);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sums, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

// Leaf 7 of CPUID; g++ 12 cannot ask for `sha` by name.
bool HasInstructions() {
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (b >> 29 & 1) != 0 && __builtin_cpu_supports("sse4.1");
}

void Hash(uint32_t* state, const unsigned char* data, size_t count) {
  static const bool has_instructions = HasInstructions();
  (has_instructions ? AddBlocksByInstructions : AddBlocks)(state, data, count);
}

}  // namespace

void Sha256::Add(const void* data, size_t size) {
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  const size_t held = size_ % kBlockBytes;
  size_ += size;
  if (held != 0) {
    const size_t taken = std::min(size, kBlockBytes - held);
    std::memcpy(block_ + held, bytes, taken);
    bytes += taken;
    size -= taken;
    if (held + taken < kBlockBytes) return;
    Hash(state_, block_, 1);
  }
  Hash(state_, bytes, size / kBlockBytes);
  std::memcpy(block_, bytes + size / kBlockBytes * kBlockBytes, size % kBlockBytes);
}

std::string Sha256::Digest() {
  const uint64_t bits = __builtin_bswap64(size_ * 8);
  unsigned char padding[2 * kBlockBytes] = {0x80};
  const size_t zeros_end = (size_ % kBlockBytes < 56 ? 56 : 120) - size_ % kBlockBytes;
  std::memcpy(padding + zeros_end, &bits, sizeof bits);
  Add(padding, zeros_end + sizeof bits);
  std::string digits;
  for (uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) digits += "0123456789abcdef"[word >> shift & 15];
  }
  return digits;
}

}  // namespace hybridc
