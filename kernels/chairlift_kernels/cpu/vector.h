// Sixteen fp32 lanes on any instruction set: GCC's vector extension, with intrinsics where the compiler needs help.
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

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

inline Floats splat(float value) { return value - Floats{}; }

inline Ints lane_numbers() {
  return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline float reduce_add(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#else
  float lane[kLanes];
  std::memcpy(lane, &v, sizeof v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
#endif
}

inline float reduce_max(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#else
  float lane[kLanes];
  std::memcpy(lane, &v, sizeof v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
#endif
}

// --- memory ----------------------------------------------------------------------------------

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
  uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &word, sizeof out);
  return out;
}

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Floats load(const bf16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
  __m512i wide = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(halves));
  return reinterpret_cast<Floats>(_mm512_slli_epi32(wide, 16));
#else
  return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
#endif
}

// Round to nearest even; a NaN stays a NaN (it is made quiet instead of rounded).
inline Halves round_bf16(Floats v) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v)));
#else
  Words word = reinterpret_cast<Words>(v);
  Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  Words quiet = (word >> 16) | 0x40u;
  return __builtin_convertvector(v == v ? rounded : quiet, Halves);
#endif
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

inline void store(bf16* to, Floats v) {
  Halves halves = round_bf16(v);
  std::memcpy(to, &halves, sizeof halves);
}

// The first `count` lanes only; the others read as zero and are never touched in memory.
template <class T>
inline Floats load_some(const T* from, int count) {
  if (count >= kLanes) return load(from);
  T buffer[kLanes] = {};
  std::memcpy(buffer, from, sizeof(T) * static_cast<size_t>(count));
  return load(buffer);
}

template <class T>
inline void store_some(T* to, Floats v, int count) {
  if (count >= kLanes) return store(to, v);
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(to, buffer, sizeof(T) * static_cast<size_t>(count));
}

// What a value becomes when written as T and read back.
inline Floats as_stored(const float*, Floats v) { return v; }

inline Floats as_stored(const bf16*, Floats v) {
  return reinterpret_cast<Floats>(__builtin_convertvector(round_bf16(v), Words) << 16);
}

// --- functions -------------------------------------------------------------------------------

constexpr float kLog2e = 1.44269504088896340736f;

// 2^r on [-1/2, 1/2], fitted at Chebyshev nodes: relative error 1e-7 (degree 5) or 1e-4 (degree 3,
// a fortieth of a bf16 step, for probabilities that are rounded to bf16 at once).
template <int kDegree>
inline Floats exp2_fraction(Floats r) {
  static_assert(kDegree == 3 || kDegree == 5);
  if constexpr (kDegree == 3) {
    Floats p = r * 0.05583828315138817f + 0.2426394820213318f;
    p = p * r + 0.6931367516517639f;
    return p * r + 0.9999245405197144f;
  } else {
    Floats p = r * 0.0013390863314270973f + 0.009676031768321991f;
    p = p * r + 0.055503569543361664f;
    p = p * r + 0.2402210682630539f;
    p = p * r + 0.6931471824645996f;
    return p * r + 1.0f;
  }
}

// 2^x for finite x; from 128 on infinity, far below zero 0.
template <int kDegree = 5>
inline Floats exp2(Floats x) {
#if defined(__AVX512F__)
  __m512 whole = _mm512_roundscale_ps(reinterpret_cast<__m512>(x), 8);
  Floats p = exp2_fraction<kDegree>(x - reinterpret_cast<Floats>(whole));
  return reinterpret_cast<Floats>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), whole));
#else
  Floats low = splat(-127.0f), high = splat(128.0f);
  x = x < low ? low : (x > high ? high : x);
  Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: the sum's low bits hold round(x)
  Floats p = exp2_fraction<kDegree>(x - (shifted - 12582912.0f));
  Ints exponent = (reinterpret_cast<Ints>(shifted) - 0x4b400000 + 127) << 23;
  return p * reinterpret_cast<Floats>(exponent);
#endif
}

// e^x for any x but NaN.
inline Floats exp(Floats x) {
  x = x * kLog2e;
  // An infinite x would leave inf - inf as its fraction.
  return exp2(x < -200.0f ? splat(-200.0f) : x < 128.0f ? x : splat(128.0f));
}

inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }

// Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
inline Floats erf(Floats x) {
  Floats size = x < 0.0f ? -x : x;
  Floats t = 1.0f / (size * 0.3275911f + 1.0f);
  Floats p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  Floats y = 1.0f - p * t * exp(size * -size);
  return x < 0.0f ? -y : y;
}

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

inline Floats activate(Activation kind, Floats x) {
  switch (kind) {
    case Activation::kSilu:
      return x / (exp(-x) + 1.0f);
    case Activation::kGeluTanh:
      return x * 0.5f * (tanh((x * x * x * 0.044715f + x) * 0.7978845608028654f) + 1.0f);
    default:
      return x * 0.5f * (erf(x * 0.7071067811865476f) + 1.0f);
  }
}

}  // namespace chairlift
