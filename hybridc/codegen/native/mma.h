// Matrix instructions of tensor cores for generated kernels, a function for each. The emulated GPU has
// functions of the same names (hybridc/emulator/native/mma_on_cpu.h).
//
// The 32 lanes of a warp call each function together. How fragments are spread over lanes is in the PTX ISA,
// "Matrix Fragments for mma". All instructions are volatile: none may move into a branch that some lanes skip.
#pragma once

#define HYBRIDC_DEVICE static __device__ __forceinline__

namespace hybridc {
HYBRIDC_DEVICE unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
}  // namespace hybridc

// Loads 8x8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8.
HYBRIDC_DEVICE void ldmatrix_x1(unsigned* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r[0]) : "r"(hybridc::shared_address(row)) : "memory");
}

HYBRIDC_DEVICE void ldmatrix_x2(unsigned* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(hybridc::shared_address(row)) : "memory");
}

HYBRIDC_DEVICE void ldmatrix_x4(unsigned* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(hybridc::shared_address(row)) : "memory");
}

// The same, each matrix transposed.
HYBRIDC_DEVICE void ldmatrix_x1_trans(unsigned* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r[0]) : "r"(hybridc::shared_address(row)) : "memory");
}

HYBRIDC_DEVICE void ldmatrix_x2_trans(unsigned* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(hybridc::shared_address(row)) : "memory");
}

HYBRIDC_DEVICE void ldmatrix_x4_trans(unsigned* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(hybridc::shared_address(row)) : "memory");
}

// Rounds two neighbouring floats to 16 bits each; the first lies in the lower half, as in fragments.
HYBRIDC_DEVICE void pack_f16(unsigned* pair, const float* x) {
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*pair) : "f"(x[1]), "f"(x[0]));
#else
  asm("{.reg .b16 low, high;\n cvt.rn.f16.f32 low, %1;\n cvt.rn.f16.f32 high, %2;\n mov.b32 %0, {low, high};}"
      : "=r"(*pair) : "f"(x[0]), "f"(x[1]));
#endif
}

// The same of two neighbouring elements of 16 bits, each in a register of its own until then: a compiler that may join
// them earlier does so right behind their loads, for which it waits there.
HYBRIDC_DEVICE void join_pair(void* pair, const void* x) {
  const unsigned short* halves = static_cast<const unsigned short*>(x);
  asm volatile("mov.b32 %0, {%1, %2};" : "=r"(*static_cast<unsigned*>(pair)) : "h"(halves[0]), "h"(halves[1]));
}

HYBRIDC_DEVICE void round_pair_f16(void* pair, const float* x) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*static_cast<unsigned*>(pair)) : "f"(x[1]), "f"(x[0]));
#else
  pack_f16(static_cast<unsigned*>(pair), x);
#endif
}

// c += a b, for a of 16 rows and b of 8 columns, and sums in 32 bits.
HYBRIDC_DEVICE void mma_m16n8k8_f16(float* c, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// Turing has the instruction of half the depth only; the fragments are those of two such instructions.
HYBRIDC_DEVICE void mma_m16n8k16_f16(float* c, const unsigned* a, const unsigned* b) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
               "{%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  mma_m16n8k8_f16(c, a, b);
  mma_m16n8k8_f16(c, a + 2, b + 1);
#endif
}

// Winograd's transform of three taps in each half of four registers: halves of their sum, and of the sum with the
// middle one subtracted.
HYBRIDC_DEVICE void transform_taps_f16(unsigned* plus, unsigned* minus, const unsigned* first, const unsigned* middle,
                                       const unsigned* last) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm("{.reg .b32 ends, half;\n mov.b32 half, 0x38003800;\n mul.rn.f16x2 ends, %2, half;\n"
        " fma.rn.f16x2 ends, %4, half, ends;\n fma.rn.f16x2 %0, %3, half, ends;\n"
        " mov.b32 half, 0xb800b800;\n fma.rn.f16x2 %1, %3, half, ends;}"
        : "=&r"(plus[i]), "=&r"(minus[i]) : "r"(first[i]), "r"(middle[i]), "r"(last[i]));
}

#if __CUDA_ARCH__ >= 800
HYBRIDC_DEVICE void pack_bf16(unsigned* pair, const float* x) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(*pair) : "f"(x[1]), "f"(x[0]));
}

HYBRIDC_DEVICE void mma_m16n8k16_bf16(float* c, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
               "{%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Rounds to the nearest number of 10 fraction bits; the instruction would cut the others off.
HYBRIDC_DEVICE void round_tf32(float* x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(*x));
  *x = __uint_as_float(bits);
}

HYBRIDC_DEVICE void mma_m16n8k8_tf32(float* c, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
               "{%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// Integers: sums that leave 32 bits wrap around. Turing has the instruction of half the rows and half the depth only;
// the fragments are those of four such instructions.
#if __CUDA_ARCH__ >= 800
#define HYBRIDC_INTEGERS(left, right)                                                                            \
  HYBRIDC_DEVICE void mma_m16n8k32_##left##_##right(int* c, const unsigned* a, const unsigned* b) {              \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." #left "." #right ".s32 {%0, %1, %2, %3}, "             \
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                                 \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                            \
  }
#else
#define HYBRIDC_INTEGERS(left, right)                                                                            \
  HYBRIDC_DEVICE void mma_m8n8k16_##left##_##right(int* c, unsigned a, unsigned b) {                             \
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32." #left "." #right ".s32 {%0, %1}, {%2}, {%3}, {%0, %1};" \
                 : "+r"(c[0]), "+r"(c[1]) : "r"(a), "r"(b));                                                     \
  }                                                                                                              \
  HYBRIDC_DEVICE void mma_m16n8k32_##left##_##right(int* c, const unsigned* a, const unsigned* b) {              \
    _Pragma("unroll") for (int part = 0; part < 4; ++part)                                                        \
      mma_m8n8k16_##left##_##right(c + part % 2 * 2, a[part], b[part / 2]);                                      \
  }
#endif
HYBRIDC_INTEGERS(s8, s8)
HYBRIDC_INTEGERS(s8, u8)
HYBRIDC_INTEGERS(u8, s8)
HYBRIDC_INTEGERS(u8, u8)
#undef HYBRIDC_INTEGERS

// Four words, `stride` words apart, are the rows of a matrix of 4x4 bytes, which becomes its transpose: ldmatrix
// transposes elements of 16 bits only.
HYBRIDC_DEVICE void transpose_bytes(void* first, int stride) {
  unsigned* word = static_cast<unsigned*>(first);
  const unsigned a = word[0], b = word[stride], c = word[2 * stride], d = word[3 * stride];
  const unsigned ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  const unsigned ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
  word[0] = __byte_perm(ab, cd, 0x5410);
  word[stride] = __byte_perm(ab, cd, 0x7632);
  word[2 * stride] = __byte_perm(ab_high, cd_high, 0x5410);
  word[3 * stride] = __byte_perm(ab_high, cd_high, 0x7632);
}
