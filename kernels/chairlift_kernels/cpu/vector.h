// Functions of sixteen lanes: partial loads and stores, exponentials, activations.
#pragma once

#include "lanes.h"

namespace chairlift {

inline Floats splat(float value) {
  return Floats{} + value;
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &word, sizeof out);
  return out;
}

// The first `count` lanes only; the others read as zero and are never touched in memory.
template <class T>
Floats load_some(const T* from, int count) {
  if (count >= kLanes) return load(from);
  T buffer[kLanes] = {};
  std::memcpy(buffer, from, sizeof(T) * static_cast<size_t>(count));
  return load(buffer);
}

template <class T>
void store_some(T* to, Floats v, int count) {
  if (count >= kLanes) return store(to, v);
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(to, buffer, sizeof(T) * static_cast<size_t>(count));
}

// body(at, count) over [0, width) in steps of 16 lanes; the count is a constant but for the last step.
template <class Body>
void each_lanes(int64_t width, Body&& body) {
  int64_t at = 0;
  for (; at + kLanes <= width; at += kLanes) body(at, std::integral_constant<int, kLanes>{});
  if (at < width) body(at, static_cast<int>(width - at));
}

constexpr float kLog2e = 1.44269504088896340736f;

// 2^r on [-1/2, 1/2], fitted at Chebyshev nodes: relative error 1e-7 (degree 5) or 1e-4 (degree 3, a
// fortieth of a bf16 step, for probabilities that are rounded to bf16 at once).
template <int kDegree>
Part exp2_fraction(Part r) {
  static_assert(kDegree == 3 || kDegree == 5);
  if constexpr (kDegree == 3) {
    Part p = r * 0.05583828315138817f + 0.2426394820213318f;
    p = p * r + 0.6931367516517639f;
    return p * r + 0.9999245405197144f;
  } else {
    Part p = r * 0.0013390863314270973f + 0.009676031768321991f;
    p = p * r + 0.055503569543361664f;
    p = p * r + 0.2402210682630539f;
    p = p * r + 0.6931471824645996f;
    return p * r + 1.0f;
  }
}

// 2^x for finite x; from 128 on infinity, far below zero 0.
template <int kDegree = 5>
Part exp2(Part x) {
#if defined(__AVX512F__)
  const __m512 whole = _mm512_roundscale_ps(reinterpret_cast<__m512>(x), 8);
  const Part p = exp2_fraction<kDegree>(x - reinterpret_cast<Part>(whole));
  return reinterpret_cast<Part>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), whole));
#else
  const Part low = Part{} - 127.0f, high = Part{} + 128.0f;
  x = select_less(x, low, low, select_less(high, x, high, x));
  const Part shifted = x + 12582912.0f;  // 1.5 * 2^23: the sum's low bits hold round(x)
  const Part p = exp2_fraction<kDegree>(x - (shifted - 12582912.0f));
  const PartInts exponent = (reinterpret_cast<PartInts>(shifted) - 0x4b400000 + 127) << 23;
  return p * reinterpret_cast<Part>(exponent);
#endif
}

template <int kDegree = 5, class Half>
Twice<Half> exp2(Twice<Half> x) {
  return {exp2<kDegree>(x.low), exp2<kDegree>(x.high)};
}

// e^x for any x but NaN: an infinite x would leave inf - inf as its fraction.
inline Floats exp(Floats x) {
  const Floats low = splat(-200.0f), high = splat(128.0f);
  x = x * kLog2e;
  return exp2(select_less(x, low, low, select_less(high, x, high, x)));
}

inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }

// Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
inline Floats erf(Floats x) {
  const Floats negative = x * -1.0f, size = max(x, negative);
  const Floats t = 1.0f / (size * 0.3275911f + 1.0f);
  Floats p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Floats y = 1.0f - p * t * exp(size * size * -1.0f);
  return select_less(x, Floats{}, y * -1.0f, y);
}

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

inline Floats activate(Activation kind, Floats x) {
  switch (kind) {
    case Activation::kSilu:
      return x / (exp(x * -1.0f) + 1.0f);
    case Activation::kGeluTanh:
      return x * 0.5f * (tanh((x * x * x * 0.044715f + x) * 0.7978845608028654f) + 1.0f);
    default:
      return x * 0.5f * (erf(x * 0.7071067811865476f) + 1.0f);
  }
}

}  // namespace chairlift
