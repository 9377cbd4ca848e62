// nvcuda::wmma on the CPU: the 16x16x16 fragments that TVM's fp16 schedules use.
#pragma once
#include "cuda_on_cpu.h"

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K>
struct Shape;
template <int M, int N, int K>
struct Shape<matrix_a, M, N, K> {
  static constexpr int rows = M, columns = K;
};
template <int M, int N, int K>
struct Shape<matrix_b, M, N, K> {
  static constexpr int rows = K, columns = N;
};
template <int M, int N, int K>
struct Shape<accumulator, M, N, K> {
  static constexpr int rows = M, columns = N;
};

// A real fragment is spread over the warp in a way that no program may know. Here lane 0 holds all of it,
// and the other lanes' copies are never read. float holds every half and bfloat16 exactly.
template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment : Shape<Use, M, N, K> {
  float values[Shape<Use, M, N, K>::rows][Shape<Use, M, N, K>::columns];
};

// Lanes meet before lane 0 reads what they wrote, and after it wrote what they will read.
template <class Action>
void as_warp(unsigned site, Action action) {
  cuda_on_cpu::warp_barrier(site);
  if (cuda_on_cpu::lane() == 0) action();
  cuda_on_cpu::warp_barrier(site + 1);
}

constexpr unsigned kLoadSite = 1u << 30, kStoreSite = kLoadSite + 2;  // beyond every __COUNTER__

template <class Fragment, class Value>
void fill_fragment(Fragment& target, Value value) {
  if (cuda_on_cpu::lane() != 0) return;
  for (auto& row : target.values)
    for (float& element : row) element = static_cast<float>(value);
}

template <class Use, int M, int N, int K, class T, class Layout, class Source>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& target, const Source* source, unsigned stride) {
  as_warp(kLoadSite, [&] {
    for (int i = 0; i < target.rows; ++i)
      for (int j = 0; j < target.columns; ++j)
        target.values[i][j] = static_cast<float>(
            std::is_same_v<Layout, row_major> ? source[i * stride + j] : source[j * stride + i]);
  });
}

template <int M, int N, int K, class T, class Source>
void load_matrix_sync(fragment<accumulator, M, N, K, T>& target, const Source* source, unsigned stride,
                      layout_t layout) {
  as_warp(kLoadSite, [&] {
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j)
        target.values[i][j] =
            static_cast<float>(layout == mem_row_major ? source[i * stride + j] : source[j * stride + i]);
  });
}

template <class Target, int M, int N, int K, class T>
void store_matrix_sync(Target* target, const fragment<accumulator, M, N, K, T>& source, unsigned stride,
                       layout_t layout) {
  as_warp(kStoreSite, [&] {
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j)
        target[layout == mem_row_major ? i * stride + j : j * stride + i] =
            static_cast<Target>(source.values[i][j]);
  });
}

// Accumulates in float, and rounds to T like the hardware's accumulator does after each instruction.
template <int M, int N, int K, class T, class A, class B>
void mma_sync(fragment<accumulator, M, N, K, T>& target, const A& a, const B& b,
              const fragment<accumulator, M, N, K, T>& addend) {
  if (cuda_on_cpu::lane() != 0) return;
  for (int i = 0; i < M; ++i) {
    float sums[N];
    for (int j = 0; j < N; ++j) sums[j] = addend.values[i][j];
    for (int k = 0; k < K; ++k)
      for (int j = 0; j < N; ++j) sums[j] += a.values[i][k] * b.values[k][j];
    for (int j = 0; j < N; ++j) target.values[i][j] = static_cast<float>(static_cast<T>(sums[j]));
  }
}

}  // namespace nvcuda::wmma
