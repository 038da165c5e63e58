// The online softmax of attention: running maxima and denominators, one matrix row at a time.
#pragma once

#include <cmath>

#include "matmul.h"

namespace chairlift {

constexpr float kNothing = -1e30f;  // a maximum below every score; finite, so differences are no NaN

// A row's maximum only keeps its weights within range, so it may lag by this much (in powers of two): sums are then
// rescaled in a row's first tile and hardly ever again (FlashAttention-4; 512 queries at 1,000 keys: 0.85 of the time).
constexpr float kSlack = 8.0f;

// Unnormalised results of `rows` rows: o [rows, width] in units of 2^maximum, and the denominators,
// kept as 16 partial sums each because adding them up per key tile costs as much as the exponentials.
struct Sums {
  float* o;
  float* totals;  // [rows, 16]
  float* maxima;  // [rows]
  int64_t width;

  static int64_t elements(int64_t rows, int64_t width) { return rows * (width + kLanes + 1); }
  static Sums at(float* memory, int64_t rows, int64_t width) {
    return {memory, memory + rows * width, memory + rows * (width + kLanes), width};
  }

  void clear(int64_t rows) const {
    std::memset(o, 0, rows * width * sizeof(float));
    std::memset(totals, 0, rows * kLanes * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) maxima[r] = kNothing;
  }
  // Moves a row to a larger maximum.
  void raise(int64_t row, float top) const {
    if (maxima[row] > kNothing) {
      const float factor = std::exp2(maxima[row] - top);
      store(totals + row * kLanes, load(totals + row * kLanes) * factor);
      for (float *x = o + row * width, *end = x + width; x < end; x += kLanes) store(x, load(x) * factor);
    }
    maxima[row] = top;
  }
  void merge(const Sums& part, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (part.maxima[r] > maxima[r]) raise(r, part.maxima[r]);
      const float factor = std::exp2(part.maxima[r] - maxima[r]);
      add(totals + r * kLanes, part.totals + r * kLanes, kLanes, factor);
      add(o + r * width, part.o + r * width, width, factor);
    }
  }

 private:
  static void add(float* to, const float* from, int64_t count, float factor) {
    for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i) * factor + load(to + i));
  }
};

// The keys [from, to) of a tile that a row sees.
struct Span {
  int from, to;
};

inline void hide(float* scores, int from, int to) {
  for (int i = from; i < to; ++i) scores[i] = kNothing;
}

// softcap * tanh(score * scale / softcap), in units of 1 / scale.
inline void cap_scores(float* scores, Span seen, float scale, float softcap) {
  for (int i = seen.from / kLanes * kLanes; i < seen.to; i += kLanes)
    store(scores + i, tanh(load(scores + i) * (scale / softcap)) * (softcap / scale));
}

// Turns one row of scores into weights 2^(score * scale - maximum), zero outside `seen`, up to `columns`.
template <class T>
void soften_row(float* scores, T* weights, Span seen, int columns, float scale, const Sums& sums, int64_t row) {
  const int begin = seen.from / kLanes * kLanes, end = (seen.to + kLanes - 1) / kLanes * kLanes;
  hide(scores, begin, seen.from);
  hide(scores, seen.to, end);
  Floats best = load(scores + begin);
  for (int i = begin + kLanes; i < end; i += kLanes) best = max(best, load(scores + i));
  best = best * scale;
  if (any_above(best, sums.maxima[row] + kSlack)) sums.raise(row, reduce_max(best));
  const float top = sums.maxima[row];
  Floats sum = load(sums.totals + row * kLanes);
  for (int i = 0; i < begin; i += kLanes) store(weights + i, Floats{});
  for (int i = begin; i < end; i += kLanes) {
    const Floats weight = exp2<std::is_same_v<T, bf16> ? 3 : 5>(load(scores + i) * scale - top);
    sum = sum + weight;
    store(weights + i, weight);
  }
  for (int i = end; i < columns; i += kLanes) store(weights + i, Floats{});
  store(sums.totals + row * kLanes, sum);
}

}  // namespace chairlift
