// Matrix instructions of tensor cores on the CPU: the functions of hybridc/codegen/native/mma.h.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

#include "cuda_on_cpu.h"

namespace cuda_on_cpu {

constexpr unsigned kMatrixSite = 1u << 29;  // beyond every __COUNTER__
constexpr int kWarps = 32;                  // of the largest block

// What the lanes of each warp bring to an instruction. The fibers of a block share one host thread. Static, as
// all that follows: threadIdx is another variable in each translation unit.
template <class T>
static T* brought() {
  static thread_local T values[kWarps][32];
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  return values[thread / 32];
}

// Every lane brings `own`, then computes from what all have brought. No lane goes on before all are done.
template <class T, class Action>
static void together(unsigned site, const T& own, Action action) {
  T* all = brought<T>();
  all[lane()] = own;
  warp_barrier(kMatrixSite + 2 * site);
  action(const_cast<const T*>(all));
  warp_barrier(kMatrixSite + 2 * site + 1);
}

template <int Matrices, bool Transposed>
static void load_matrices(unsigned* registers, const void* row) {
  struct Row {
    const uint16_t* at;
  };
  if (lane() < 8 * Matrices) note_access(row, 16, false);
  const Row own_row{static_cast<const uint16_t*>(row)};
  together(Matrices + 4 * Transposed, own_row, [&](const Row* rows) HYBRIDC_UNCOUNTED {
    const int own = lane(), line = own / 4, pair = own % 4 * 2;
    for (int m = 0; m < Matrices; ++m) {
      const Row* matrix = rows + 8 * m;
      for (int i = 0; i < 8; ++i)
        // hardware refuses rows that are not aligned; here an access to address 0 fails
        if (reinterpret_cast<uintptr_t>(matrix[i].at) % 16) *static_cast<volatile char*>(nullptr) = 0;
      const uint16_t low = Transposed ? matrix[pair].at[line] : matrix[line].at[pair];
      const uint16_t high = Transposed ? matrix[pair + 1].at[line] : matrix[line].at[pair + 1];
      registers[m] = low | static_cast<unsigned>(high) << 16;
    }
  });
}

// How a 32-bit register holds numbers of each type.
struct HalfPair {
  using Sum = float;
  static constexpr int count = 2;
  static float at(unsigned bits, int e) {
    return __half2float(same_bits<__half>(static_cast<uint16_t>(bits >> 16 * e)));
  }
};
struct BfloatPair {
  using Sum = float;
  static constexpr int count = 2;
  static float at(unsigned bits, int e) { return same_bits<float>(bits >> 16 * e << 16); }
};
struct Tf32 {
  using Sum = float;
  static constexpr int count = 1;
  static float at(unsigned bits, int) { return same_bits<float>(bits & 0xffffe000u); }  // the rest is ignored
};
struct SignedBytes {
  using Sum = int;
  static constexpr int count = 4;
  static int at(unsigned bits, int e) { return static_cast<int8_t>(bits >> 8 * e); }
};
struct UnsignedBytes {
  using Sum = int;
  static constexpr int count = 4;
  static int at(unsigned bits, int e) { return static_cast<uint8_t>(bits >> 8 * e); }
};

static inline float added(float sum, float product) { return sum + product; }
// Wraps around, as the instruction does without `.satfinite`.
static inline int added(int sum, int product) {
  return static_cast<int>(static_cast<unsigned>(sum) + static_cast<unsigned>(product));
}

// Sums in the order of k. Hardware adds a few products at a time and cuts off bits, which differs in the last
// bits of a sum.
template <int Depth, class Left, class Right>
static void multiply_add(unsigned site, typename Left::Sum* c, const unsigned* a, const unsigned* b) {
  constexpr int parts = Depth / (4 * Left::count);  // registers of b; a has as many for its lower rows
  struct Operands {
    unsigned a[2 * parts], b[parts];
  } own;
  std::copy_n(a, 2 * parts, own.a);
  std::copy_n(b, parts, own.b);
  together(site, own, [&](const Operands* all) {
    const int row = lane() / 4, column = lane() % 4 * 2;
    for (int part = 0; part < parts; ++part)
      for (int k = 0; k < 4; ++k)
        for (int e = 0; e < Left::count; ++e)
          for (int i = 0; i < 4; ++i)
            c[i] = added(c[i], Left::at(all[row * 4 + k].a[2 * part + i / 2], e) *
                                   Right::at(all[(column + i % 2) * 4 + k].b[part], e));
  });
}

}  // namespace cuda_on_cpu

// To nearest, ties away from zero.
static inline void round_tf32(float* x) {
  if (std::isfinite(*x)) *x = same_bits<float>((same_bits<unsigned>(*x) + 0x1000u) & 0xffffe000u);
}

static inline void pack_f16(unsigned* pair, const float* x) {
  *pair = same_bits<uint16_t>(__float2half_rn(x[0])) | unsigned{same_bits<uint16_t>(__float2half_rn(x[1]))} << 16;
}

static inline void join_pair(void* pair, const void* x) { std::memcpy(pair, x, 4); }

static inline void round_pair_f16(void* pair, const float* x) {
  unsigned joined;
  pack_f16(&joined, x);
  std::memcpy(pair, &joined, 4);
}

static inline void transform_taps_f16(unsigned* plus, unsigned* minus, const unsigned* first, const unsigned* middle,
                                      const unsigned* last) {
  const auto rounded = [](float x) { return __half2float(__float2half_rn(x)); };
  for (int i = 0; i < 4; ++i) {
    float sum[2], difference[2];
    for (int e = 0; e < 2; ++e) {
      const auto half_of = [&](const unsigned* taps) { return 0.5f * cuda_on_cpu::HalfPair::at(taps[i], e); };
      const float ends = rounded(half_of(last) + rounded(half_of(first)));
      sum[e] = ends + half_of(middle);
      difference[e] = ends - half_of(middle);
    }
    pack_f16(plus + i, sum);
    pack_f16(minus + i, difference);
  }
}

static inline void pack_bf16(unsigned* pair, const float* x) {
  *pair = same_bits<uint16_t>(__float2bfloat16_rn(x[0])) |
          unsigned{same_bits<uint16_t>(__float2bfloat16_rn(x[1]))} << 16;
}

static inline void transpose_bytes(void* first, int stride) {
  uint8_t* row[4];
  for (int i = 0; i < 4; ++i) row[i] = static_cast<uint8_t*>(first) + 4 * stride * i;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < i; ++j) std::swap(row[i][j], row[j][i]);
}

#define HYBRIDC_LOAD(name, count, transposed)                      \
  static inline void name(unsigned* registers, const void* row) { \
    cuda_on_cpu::load_matrices<count, transposed>(registers, row); \
  }
HYBRIDC_LOAD(ldmatrix_x1, 1, false)
HYBRIDC_LOAD(ldmatrix_x2, 2, false)
HYBRIDC_LOAD(ldmatrix_x4, 4, false)
HYBRIDC_LOAD(ldmatrix_x1_trans, 1, true)
HYBRIDC_LOAD(ldmatrix_x2_trans, 2, true)
HYBRIDC_LOAD(ldmatrix_x4_trans, 4, true)
#undef HYBRIDC_LOAD

#define HYBRIDC_MMA(name, site, depth, left, right)                                                       \
  static inline void name(cuda_on_cpu::left::Sum* c, const unsigned* a, const unsigned* b) {              \
    cuda_on_cpu::multiply_add<depth, cuda_on_cpu::left, cuda_on_cpu::right>(site, c, a, b);               \
  }
HYBRIDC_MMA(mma_m16n8k8_f16, 16, 8, HalfPair, HalfPair)
HYBRIDC_MMA(mma_m16n8k16_f16, 17, 16, HalfPair, HalfPair)
HYBRIDC_MMA(mma_m16n8k16_bf16, 18, 16, BfloatPair, BfloatPair)
HYBRIDC_MMA(mma_m16n8k8_tf32, 19, 8, Tf32, Tf32)
HYBRIDC_MMA(mma_m16n8k32_s8_s8, 20, 32, SignedBytes, SignedBytes)
HYBRIDC_MMA(mma_m16n8k32_s8_u8, 21, 32, SignedBytes, UnsignedBytes)
HYBRIDC_MMA(mma_m16n8k32_u8_s8, 22, 32, UnsignedBytes, SignedBytes)
HYBRIDC_MMA(mma_m16n8k32_u8_u8, 23, 32, UnsignedBytes, UnsignedBytes)
#undef HYBRIDC_MMA
