// The one matrix kernel of this library: a few rows times a pair of packed 16-column panels.
//
// A panel holds `steps` tiles of 32 (k) x 16 (columns). A tile of bf16 stores two neighbouring k of one column side
// by side ([k/2][column][2], 1 KB), which is both what an AMX tile and what a 512-bit bf16 dot product reads; a tile
// of fp32 is [k][column]. Weights, the K cache (columns are keys) and the V cache (columns are head dimensions) are
// all kept like this. Every row's sums run over k in the same order whatever the other rows are.
#pragma once

#include "parallel.h"
#include "vector.h"

namespace chairlift {

constexpr int kStep = 32;            // k per tile
constexpr int kPair = 2 * kLanes;    // columns per call
constexpr int kTile = kStep * kLanes;  // elements per tile

// Where the tiles of the two panels lie: at a fixed distance,
template <class T>
struct EvenPanels {
  const T* from;
  const T* other;
  int64_t stride;  // elements from one tile to the next of the same panel

  const T* first(int step) const { return from + step * stride; }
  const T* second(int step) const { return other + step * stride; }
};

// or anywhere, the second panel's `distance` elements after the first's.
template <class T>
struct ListedPanels {
  const T* const* tiles;
  int64_t offset, distance;

  const T* first(int step) const { return tiles[step] + offset; }
  const T* second(int step) const { return tiles[step] + offset + distance; }
};

// What to fetch from memory while computing: fetch() is called once per step, a little each time, so that
// the 16 or so requests a core can have in flight never run dry and never hold up the loads of the sums.
struct Stream {
  const char* from;
  int lines;  // cache lines per step

  void fetch() {
    prefetch_lines(from, lines);
    from += lines * 64;
  }
};

#if defined(__AVX512BF16__)
struct Pairs {  // one k pair of both panels
  __m512bh first, second;
};

inline Pairs load_pairs(const bf16* first, const bf16* second) {
  return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(first)),
          reinterpret_cast<__m512bh>(_mm512_loadu_si512(second))};
}

inline void multiply_add(Floats* c, const bf16* a, const Pairs& b) {
  int32_t pair;
  std::memcpy(&pair, a, sizeof pair);
  auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
  c[0] = reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(c[0]), both, b.first));
  c[1] = reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(c[1]), both, b.second));
}
#else
struct Pairs {
  Floats first_even, first_odd, second_even, second_odd;
};

inline Pairs load_pairs(const bf16* first, const bf16* second) {
  using R = Reader<Floats>;
  return {R::read_even(first), R::read_odd(first), R::read_even(second), R::read_odd(second)};
}

inline void multiply_add(Floats* c, const bf16* a, const Pairs& b) {
  const float even = to_float(a[0]), odd = to_float(a[1]);
  c[0] = c[0] + b.first_even * even + b.first_odd * odd;
  c[1] = c[1] + b.second_even * even + b.second_odd * odd;
}
#endif

struct Singles {
  Floats first, second;
};

inline Singles load_pairs(const float* first, const float* second) {
  return {load(first), load(second)};
}

inline void multiply_add(Floats* c, const float* a, const Singles& b) {
  c[0] = c[0] + b.first * *a;
  c[1] = c[1] + b.second * *a;
}

template <class T>
constexpr int kPack = std::is_same_v<T, bf16> ? 2 : 1;  // k stored side by side

// Whether the rows should be fetched past L1, so that a pair of panels stays there while many rows go by.
enum class Rows { kKept, kPassing };

// c[rows, 32] (+)= a[rows, 32 * steps] x panels, in vector registers.
template <class T>
struct VectorMatmul {
  static constexpr bool kHasOwnUnit = false;
#if defined(__AVX512F__)
  static constexpr int kMaxRows = 12;  // 24 sums, 2 panel registers, 1 broadcast of 32
#else
  static constexpr int kMaxRows = 2;
#endif

  template <Rows, class Panels, class Ahead>
  void run(const T* a, int64_t lda, int rows, const Panels& b, int steps, float* c, int64_t ldc,
           bool accumulate, Ahead& ahead) {
    dispatch<kMaxRows>(a, lda, rows, b, steps, c, ldc, accumulate, ahead);
  }

 private:
  template <int kRows, class Panels, class Ahead>
  static void dispatch(const T* a, int64_t lda, int rows, const Panels& b, int steps, float* c,
                       int64_t ldc, bool accumulate, Ahead& ahead) {
    if (rows == kRows) return multiply<kRows>(a, lda, b, steps, c, ldc, accumulate, ahead);
    if constexpr (kRows > 1)
      dispatch<kRows - 1>(a, lda, rows, b, steps, c, ldc, accumulate, ahead);
  }

  template <int kRows, class Panels, class Ahead>
  static void multiply(const T* a, int64_t lda, const Panels& b, int steps, float* c, int64_t ldc,
                       bool accumulate, Ahead& ahead) {
    Floats sum[kRows][2];
    for (int r = 0; r < kRows; ++r)
      for (int half = 0; half < 2; ++half)
        sum[r][half] = accumulate ? load(c + r * ldc + half * kLanes) : Floats{};
    for (int step = 0; step < steps; ++step) {
      const T* first = b.first(step);
      const T* second = b.second(step);
      ahead.fetch();
      for (int k = 0; k < kStep; k += kPack<T>) {
        const auto columns = load_pairs(first + k * kLanes, second + k * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) multiply_add(sum[r], a + r * lda + step * kStep + k, columns);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int half = 0; half < 2; ++half) store(c + r * ldc + half * kLanes, sum[r][half]);
  }
};

template <class T>
struct MatmulFor {
  using type = VectorMatmul<T>;
};

}  // namespace chairlift

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include "matmul_amx.h"
#endif

namespace chairlift {
template <class T>
using Matmul = typename MatmulFor<T>::type;
}
