// Sixteen fp32 lanes on any instruction set, out of GCC's vectors of the machine's own width: vectors
// wider than that are legal too, but GCC 12 takes their comparisons and conversions apart lane by lane.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace chairlift {

constexpr int kLanes = 16;

struct bf16 {
  uint16_t bits;
};

template <class Half>
struct Twice {
  Half low, high;
};

#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif

using Part = float __attribute__((vector_size(4 * kNative)));
using PartInts = int32_t __attribute__((vector_size(4 * kNative)));
using PartWords = uint32_t __attribute__((vector_size(4 * kNative)));
using PartHalves = uint16_t __attribute__((vector_size(2 * kNative)));
using Floats = std::conditional_t<kNative == 16, Part,
                                  std::conditional_t<kNative == 8, Twice<Part>, Twice<Twice<Part>>>>;

template <class Half>
Twice<Half> operator+(Twice<Half> a, Twice<Half> b) {
  return {a.low + b.low, a.high + b.high};
}
template <class Half>
Twice<Half> operator-(Twice<Half> a, Twice<Half> b) {
  return {a.low - b.low, a.high - b.high};
}
template <class Half>
Twice<Half> operator*(Twice<Half> a, Twice<Half> b) {
  return {a.low * b.low, a.high * b.high};
}
template <class Half>
Twice<Half> operator/(Twice<Half> a, Twice<Half> b) {
  return {a.low / b.low, a.high / b.high};
}
template <class Half>
Twice<Half> operator+(Twice<Half> a, float b) {
  return {a.low + b, a.high + b};
}
template <class Half>
Twice<Half> operator-(Twice<Half> a, float b) {
  return {a.low - b, a.high - b};
}
template <class Half>
Twice<Half> operator-(float a, Twice<Half> b) {
  return {a - b.low, a - b.high};
}
template <class Half>
Twice<Half> operator*(Twice<Half> a, float b) {
  return {a.low * b, a.high * b};
}
template <class Half>
Twice<Half> operator/(float a, Twice<Half> b) {
  return {a / b.low, a / b.high};
}

// a < b ? x : y, lane by lane
inline Part select_less(Part a, Part b, Part x, Part y) { return a < b ? x : y; }
template <class Half>
Twice<Half> select_less(Twice<Half> a, Twice<Half> b, Twice<Half> x, Twice<Half> y) {
  return {select_less(a.low, b.low, x.low, y.low), select_less(a.high, b.high, x.high, y.high)};
}

template <class V>
V max(V a, V b) {
  return select_less(b, a, a, b);
}

inline float reduce_add(Part v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#else
  float sum = v[0];
  for (int i = 1; i < kNative; ++i) sum += v[i];
  return sum;
#endif
}
template <class Half>
float reduce_add(Twice<Half> v) {
  return reduce_add(v.low + v.high);
}

inline float reduce_max(Part v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#else
  float most = v[0];
  for (int i = 1; i < kNative; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}
template <class Half>
float reduce_max(Twice<Half> v) {
  return reduce_max(max(v.low, v.high));
}

inline bool any_above(Floats v, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(v), _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  return reduce_max(v) > limit;
#endif
}

// --- memory ----------------------------------------------------------------------------------

// Lane count and element type in `V`'s place: how load() below knows what to return.
template <class V>
struct Reader {
  static V read(const float* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static V read(const bf16* from) {
    PartHalves halves;
    std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(halves));
    return reinterpret_cast<V>(_mm512_slli_epi32(wide, 16));
#else
    return reinterpret_cast<V>(__builtin_convertvector(halves, PartWords) << 16);
#endif
  }
  // The lower or the upper bf16 of each 32-bit word.
  static V read_even(const bf16* from) { return reinterpret_cast<V>(words(from) << 16); }
  static V read_odd(const bf16* from) { return reinterpret_cast<V>(words(from) & 0xffff0000u); }

 private:
  static PartWords words(const bf16* from) {
    PartWords words;
    std::memcpy(&words, from, sizeof words);
    return words;
  }
};

template <class Half>
struct Reader<Twice<Half>> {
  static constexpr int kHalf = sizeof(Half) / sizeof(float);
  using R = Reader<Half>;
  template <class T>
  static Twice<Half> read(const T* from) {
    return {R::read(from), R::read(from + kHalf)};
  }
  static Twice<Half> read_even(const bf16* from) {
    return {R::read_even(from), R::read_even(from + 2 * kHalf)};
  }
  static Twice<Half> read_odd(const bf16* from) {
    return {R::read_odd(from), R::read_odd(from + 2 * kHalf)};
  }
};

template <class T>
Floats load(const T* from) {
  return Reader<Floats>::read(from);
}

// Round to nearest even; a NaN stays a NaN (it is made quiet instead of rounded).
inline PartHalves round_bf16(Part v) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<PartHalves>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v)));
#else
  const PartWords word = reinterpret_cast<PartWords>(v);
  const PartWords rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  const PartWords quiet = (word >> 16) | 0x40u;
  return __builtin_convertvector(v == v ? rounded : quiet, PartHalves);
#endif
}

inline void store(float* to, Part v) { std::memcpy(to, &v, sizeof v); }
inline void store(bf16* to, Part v) {
  const PartHalves halves = round_bf16(v);
  std::memcpy(to, &halves, sizeof halves);
}
template <class T, class Half>
void store(T* to, Twice<Half> v) {
  store(to, v.low);
  store(to + sizeof(Half) / sizeof(float), v.high);
}

// What a value becomes when written as T and read back.
inline Part as_stored(const bf16*, Part v) {
  return reinterpret_cast<Part>(__builtin_convertvector(round_bf16(v), PartWords) << 16);
}
template <class Half>
Twice<Half> as_stored(const bf16* type, Twice<Half> v) {
  return {as_stored(type, v.low), as_stored(type, v.high)};
}
template <class V>
V as_stored(const float*, V v) {
  return v;
}

}  // namespace chairlift
