// The small operators between the matrix products: norms, gated activation, rotary embedding and cache write.
#include <cmath>

#include "cache.h"

namespace chairlift {
namespace {

// Elements per task: about 10 us of work, against 1-2 us for waking the other threads.
constexpr int64_t kGrain = 16384;

int64_t rows_per_task(int64_t width) { return kGrain / width > 1 ? kGrain / width : 1; }

// Llama: round(x * r) * w. Gemma: round(x * r * (1 + w)).
template <class T>
Floats apply_norm(Floats x, float factor, const T* weight, int count, bool unit_offset) {
  const Floats w = load_some(weight, count);
  return unit_offset ? x * factor * (w + 1.0f) : as_stored(weight, x * factor) * w;
}

template <class T>
void norm_row(const T* x, T* residual, const T* weight, T* out, int64_t width, float eps, bool unit_offset) {
  Floats squares{};
  each_lanes(width, [&](int64_t i, auto count) {
    Floats v = load_some(x + i, count);
    if (residual) {
      v = as_stored(x, v + load_some(residual + i, count));
      store_some(residual + i, v, count);
    }
    squares = squares + v * v;
  });
  const float factor = 1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(width) + eps);
  const T* from = residual ? residual : x;
  each_lanes(width, [&](int64_t i, auto count) {
    store_some(out + i, apply_norm(load_some(from + i, count), factor, weight + i, count, unit_offset), count);
  });
}

template <class T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t ldo, int64_t rows, int64_t width, float eps,
              bool unit_offset, int threads) {
  parallel_ranges(threads, rows, rows_per_task(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      norm_row(x + row * width, residual ? residual + row * width : nullptr, weight, out + row * ldo, width, eps,
               unit_offset);
  });
}

template <class T>
void gated(const T* gate_up, T* out, int64_t rows, int64_t width, Activation activation, int threads) {
  parallel_ranges(threads, rows, rows_per_task(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      each_lanes(width, [&](int64_t i, auto count) {
        const T* gate = gate_up + row * 2 * width + i;
        const Floats v = activate(activation, load_some(gate, count)) * load_some(gate + width, count);
        store_some(out + row * width + i, v, count);
      });
  });
}

constexpr int64_t kMaxHeadDim = 512;

template <class T, class Angle>
struct Rotary {
  const T* qkv;
  int64_t stride;  // of a token
  const Angle* cos;
  const Angle* sin;
  int64_t angles;  // rotated dimensions
  CacheLayer<T> cache;
  const int64_t* slots;
  T* q_out;
  int64_t heads;
  const T* q_norm;
  const T* k_norm;
  float eps;
  bool unit_offset;

  void token(int64_t t) const {
    const int64_t dim = cache.key_dim;
    const T* from = qkv + t * stride;
    for (int64_t head = 0; head < heads; ++head)
      turn(from + head * dim, q_norm, t, q_out + (t * heads + head) * dim);
    if (slots[t] < 0) return;
    const T* keys = from + heads * dim;
    const T* values = keys + cache.heads * dim;
    T key[kMaxHeadDim];
    for (int64_t head = 0; head < cache.heads; ++head) {
      turn(keys + head * dim, k_norm, t, key);
      cache.write_key(slots[t], head, key);
      cache.write_value(slots[t], head, values + head * cache.value_dim);
    }
  }

 private:
  // Norm, then rotation of the first `angles` dimensions: halves (a, b) -> (a cos - b sin, b cos + a sin).
  void turn(const T* from, const T* norm, int64_t t, T* to) const {
    const int64_t dim = cache.key_dim, half = angles / 2;
    float head[kMaxHeadDim];
    each_lanes(dim, [&](int64_t i, auto count) { store_some(head + i, load_some(from + i, count), count); });
    if (norm) normalise(head, norm, dim);
    const Angle* c = cos + t * angles;
    const Angle* s = sin + t * angles;
    each_lanes(half, [&](int64_t i, auto count) {
      const Floats a = load_some(head + i, count), b = load_some(head + half + i, count);
      store_some(head + i, a * load_some(c + i, count) - b * load_some(s + i, count), count);
      store_some(head + half + i, b * load_some(c + half + i, count) + a * load_some(s + half + i, count), count);
    });
    each_lanes(dim, [&](int64_t i, auto count) { store_some(to + i, load_some(head + i, count), count); });
  }

  void normalise(float* head, const T* norm, int64_t dim) const {
    Floats squares{};
    each_lanes(dim, [&](int64_t i, auto count) {
      const Floats v = load_some(head + i, count);
      squares = squares + v * v;
    });
    const float factor = 1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(dim) + eps);
    each_lanes(dim, [&](int64_t i, auto count) {
      const Floats v = apply_norm(load_some(head + i, count), factor, norm + i, count, unit_offset);
      store_some(head + i, as_stored(norm, v), count);
    });
  }
};

template <class T, class Angle>
void rotate(const Rotary<T, Angle>& rotary, int64_t tokens, int threads) {
  const int64_t width = (rotary.heads + 2 * rotary.cache.heads) * rotary.cache.key_dim;
  parallel_ranges(threads, tokens, rows_per_task(2 * width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) rotary.token(t);
  });
}

}  // namespace
}  // namespace chairlift

using namespace chairlift;

// x, out (row stride ldo) and residual (or null; updated in place) [rows, width], weight [width]: all of one type.
CHAIRLIFT_EXPORT void chairlift_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t ldo,
                                         int64_t rows, int64_t width, float eps, int unit_offset, int is_float,
                                         int threads) {
  const auto solve = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    rms_norm(static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight), to, ldo, rows, width,
             eps, unit_offset != 0, threads);
  };
  if (is_float)
    solve(static_cast<float*>(out));
  else
    solve(static_cast<bf16*>(out));
}

// gate_up [rows, 2 * width] -> act(left half) * right half.
CHAIRLIFT_EXPORT void chairlift_gated_activation(const void* gate_up, void* out, int64_t rows, int64_t width,
                                                 int activation, int is_float, int threads) {
  const auto kind = static_cast<Activation>(activation);
  if (is_float)
    gated(static_cast<const float*>(gate_up), static_cast<float*>(out), rows, width, kind, threads);
  else
    gated(static_cast<const bf16*>(gate_up), static_cast<bf16*>(out), rows, width, kind, threads);
}

// qkv [tokens, (heads + 2 kv_heads) * dim] -> q_out [tokens, heads, dim]; keys and values go to the cache.
CHAIRLIFT_EXPORT void chairlift_rope_and_cache(const void* qkv, int64_t stride, const void* cos, const void* sin,
                                               int64_t angles, int angles_are_float, void* base, int64_t kv_heads,
                                               int64_t dim, int64_t value_dim, int64_t block_size,
                                               const int64_t* slots, void* q_out, int64_t tokens, int64_t heads,
                                               const void* q_norm, const void* k_norm, float eps, int unit_offset,
                                               int is_float, int threads) {
  const auto solve = [&](auto* cache, auto* angle) {
    using T = std::remove_pointer_t<decltype(cache)>;
    using Angle = std::remove_pointer_t<decltype(angle)>;
    const Rotary<T, Angle> rotary{static_cast<const T*>(qkv), stride, static_cast<const Angle*>(cos),
                                  static_cast<const Angle*>(sin), angles,
                                  {cache, kv_heads, dim, value_dim, block_size}, slots, static_cast<T*>(q_out), heads,
                                  static_cast<const T*>(q_norm), static_cast<const T*>(k_norm), eps, unit_offset != 0};
    rotate(rotary, tokens, threads);
  };
  const auto choose = [&](auto* cache) {
    if (angles_are_float)
      solve(cache, static_cast<float*>(nullptr));
    else
      solve(cache, static_cast<bf16*>(nullptr));
  };
  if (is_float)
    choose(static_cast<float*>(base));
  else
    choose(static_cast<bf16*>(base));
}
