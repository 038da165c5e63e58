// Flash-style attention of one work item over the paged cache: scores, softmax and values per key tile.
//
// An item is a few queries of one sequence times the query heads that share a KV head; its matrix rows
// are (token, head) pairs, so each K and V tile is read once for all of them. Keys are walked in tiles
// and segments whose borders depend on the key's position alone, and segments are merged in order: a
// token's result is the same bits whatever the batch, the chunking of its prompt, or the thread count.
#pragma once

#include <cmath>

#include "cache.h"

namespace chairlift {

constexpr int kKeyTile = 128;    // keys per softmax step; a rescale of the sums at most once per tile
constexpr int kSegment = 512;    // keys between merges: the unit a long row is split over threads by
constexpr float kNothing = -1e30f;  // a maximum below every score; finite, so differences are never NaN

template <class T>
constexpr int kItemRows = Matmul<T>::kMaxRows == 2 ? 16 : Matmul<T>::kMaxRows == 12 ? 48 : 64;

template <class T>
struct Problem {
  const T* q;
  int64_t q_token, q_head;  // strides
  T* out;
  int64_t out_token, out_head;
  CacheLayer<T> cache;
  const int32_t* tables;  // [sequences, table_width]
  int64_t table_width;
  const int32_t* starts;   // [sequences + 1], into the tokens
  const int32_t* lengths;  // [sequences], keys
  int64_t heads;           // of the queries
  float scale;
  int64_t window;  // 0: none
  float softcap;   // 0: none
  const float* sinks;

  int64_t position(int64_t sequence, int64_t token) const {
    return lengths[sequence] - starts[sequence + 1] + token;
  }
  int64_t first_key(int64_t position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
};

struct Item {
  int32_t sequence, kv_head, first_head, heads, token, tokens;
  int64_t from, to;   // keys
  int64_t partial;    // place in the partial results, for a share of a longer item
  int rows() const { return heads * tokens; }
};

// Unnormalised results: o [rows, width] in units of 2^maximum, and the softmax denominators.
struct Sums {
  float* o;
  float* maximum;
  float* total;
};

inline int64_t segment_end(int64_t from, int64_t to) {
  const int64_t end = (from / kSegment + 1) * kSegment;
  return end < to ? end : to;
}

inline void clear(Sums sums, int rows, int64_t width) {
  std::memset(sums.o, 0, rows * width * sizeof(float));
  for (int r = 0; r < rows; ++r) sums.maximum[r] = kNothing, sums.total[r] = 0.0f;
}

inline void scale_row(float* row, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += kLanes) store(row + i, load(row + i) * factor);
}

// into += part
inline void merge(Sums into, Sums part, int rows, int64_t width) {
  for (int r = 0; r < rows; ++r) {
    const float top = std::fmax(into.maximum[r], part.maximum[r]);
    const float keep = std::exp2(into.maximum[r] - top), add = std::exp2(part.maximum[r] - top);
    into.maximum[r] = top;
    into.total[r] = into.total[r] * keep + part.total[r] * add;
    float* o = into.o + r * width;
    const float* other = part.o + r * width;
    for (int64_t i = 0; i < width; i += kLanes) store(o + i, load(o + i) * keep + load(other + i) * add);
  }
}

// Divides by the denominator (a sink adds one key without a value to it) and writes the rows out.
template <class T>
void finish(const Problem<T>& p, const Item& item, Sums sums, int64_t width) {
  for (int r = 0; r < item.rows(); ++r) {
    const int64_t token = item.token + r / item.heads, head = item.first_head + r % item.heads;
    float total = sums.total[r], unit = 1.0f;
    if (p.sinks) {
      const float sink = p.sinks[head] * kLog2e, top = std::fmax(sink, sums.maximum[r]);
      unit = std::exp2(sums.maximum[r] - top);
      total = total * unit + std::exp2(sink - top);
    }
    const float factor = total > 0.0f ? unit / total : 0.0f;
    T* out = p.out + token * p.out_token + head * p.out_head;
    for (int64_t i = 0; i < p.cache.value_dim; i += kLanes) {
      const int64_t left = p.cache.value_dim - i;
      store_some(out + i, load(sums.o + r * width + i) * factor, static_cast<int>(left < kLanes ? left : kLanes));
    }
  }
}

template <class T>
class AttentionWorker {
 public:
  static constexpr int kRows = kItemRows<T>;

  explicit AttentionWorker(const Problem<T>& problem)
      : p_(problem),
        depth_(problem.cache.key_depth()),
        width_(round_up(problem.cache.value_dim, kPair)),
        q_(make_buffer<T>(kRows * depth_)),
        scores_(make_buffer<float>(kRows * kKeyTile)),
        weights_(make_buffer<T>(kRows * kKeyTile)),
        values_(make_buffer<T>(problem.cache.value_columns() * kKeyTile)),
        state_(make_buffer<float>(2 * kRows * (width_ + 2))) {}

  int64_t width() const { return width_; }
  Sums sums(int which) const { return sums_at(state_.get() + which * kRows * (width_ + 2), width_); }

  static Sums sums_at(float* at, int64_t width) {
    return {at, at + kRows * width, at + kRows * (width + 1)};
  }

  // The item's result in the returned sums, which live until the next call.
  Sums run(const Item& item) {
    load_queries(item);
    const Sums whole = sums(0), part = sums(1);
    segment(item, item.from, segment_end(item.from, item.to), whole);
    for (int64_t from = segment_end(item.from, item.to); from < item.to; from = segment_end(from, item.to)) {
      segment(item, from, segment_end(from, item.to), part);
      merge(whole, part, item.rows(), width_);
    }
    return whole;
  }

 private:
  const Problem<T>& p_;
  const int64_t depth_, width_;
  Buffer<T> q_;
  Buffer<float> scores_;
  Buffer<T> weights_, values_;
  Buffer<float> state_;
  Matmul<T> matmul_;

  void load_queries(const Item& item) {
    const int64_t dim = p_.cache.key_dim;
    for (int r = 0; r < item.rows(); ++r) {
      const int64_t token = item.token + r / item.heads, head = item.first_head + r % item.heads;
      T* to = q_.get() + r * depth_;
      std::memcpy(to, p_.q + token * p_.q_token + head * p_.q_head, dim * sizeof(T));
      std::memset(to + dim, 0, (depth_ - dim) * sizeof(T));
    }
  }

  void segment(const Item& item, int64_t from, int64_t to, Sums sums) {
    clear(sums, item.rows(), width_);
    while (from < to) {
      const int64_t first = from / kLanes * kLanes;
      const int64_t border = (from / kKeyTile + 1) * kKeyTile, end = border < to ? border : to;
      score(item, first, end);
      load_values(item, first, end);
      soften(item, first, end, sums);
      multiply_rows(item.rows(), weights_.get(), kKeyTile, static_cast<int>(ceil_div(end - first, kStep)), sums.o);
      from = end;
    }
  }

  const int32_t* table(const Item& item) const { return p_.tables + item.sequence * p_.table_width; }

  void score(const Item& item, int64_t first, int64_t end) {
    const int32_t* blocks = table(item);
    const int64_t size = p_.cache.block_size;
    for (int64_t key = first; key < end; key += kPair) {
      const int64_t other = key + kLanes < end ? key + kLanes : key;
      const Panels<T> panels{p_.cache.key_group(blocks[key / size], item.kv_head, key % size),
                             p_.cache.key_group(blocks[other / size], item.kv_head, other % size), kTile};
      for (int r = 0; r < item.rows(); r += Matmul<T>::kMaxRows) {
        const int rows = item.rows() - r < Matmul<T>::kMaxRows ? item.rows() - r : Matmul<T>::kMaxRows;
        matmul_.run(q_.get() + r * depth_, depth_, rows, panels, static_cast<int>(depth_ / kStep),
                    scores_.get() + r * kKeyTile + (key - first), kKeyTile, false);
      }
    }
  }

  // o += weights x values
  void multiply_rows(int rows, const T* weights, int64_t ld, int steps, float* o) {
    const int64_t panel = kKeyTile * kLanes;
    for (int64_t column = 0; column < width_; column += kPair) {
      const T* values = values_.get() + column / kLanes * panel;
      const bool both = column + kLanes < p_.cache.value_columns();
      for (int r = 0; r < rows; r += Matmul<T>::kMaxRows) {
        const int count = rows - r < Matmul<T>::kMaxRows ? rows - r : Matmul<T>::kMaxRows;
        matmul_.run(weights + r * ld, ld, count, {values, both ? values + panel : values, kTile}, steps,
                    o + r * width_ + column, width_, true);
      }
    }
  }

  // Panels of the tile's values, 128 keys long, zero where there is no key: 0 x NaN would be NaN.
  void load_values(const Item& item, int64_t first, int64_t end) {
    constexpr int64_t group = kLanes * kLanes;
    const int32_t* blocks = table(item);
    const int64_t size = p_.cache.block_size, panels = p_.cache.value_columns() / kLanes;
    const int64_t padded = first + round_up(end - first, kStep);
    for (int64_t key = first; key < padded; key += kLanes) {
      T* to = values_.get() + (key - first) * kLanes;
      const int64_t present = end - key;
      for (int64_t panel = 0; panel < panels; ++panel, to += kKeyTile * kLanes) {
        if (present <= 0) {
          std::memset(to, 0, group * sizeof(T));
          continue;
        }
        const T* from = p_.cache.value_group(blocks[key / size], item.kv_head, panel, key % size);
        std::memcpy(to, from, group * sizeof(T));
        if (present < kLanes) blank_from(to, present);
      }
    }
  }

  static void blank_from(T* group, int64_t present) {
    constexpr int64_t pack = kPack<T>;
    for (int64_t key = present; key < kLanes; ++key)
      for (int64_t dim = 0; dim < kLanes; ++dim) group[key / pack * pack * kLanes + dim * pack + key % pack] = T{};
  }

  void soften(const Item& item, int64_t first, int64_t end, Sums sums) {
    const int64_t columns = round_up(end - first, kStep);
    for (int r = 0; r < item.rows(); ++r) {
      const int64_t position = p_.position(item.sequence, item.token + r / item.heads);
      const int64_t low = p_.first_key(position) - first, high = position + 1 - first;
      const int from = static_cast<int>(low > 0 ? low : 0);
      const int to = static_cast<int>(high < end - first ? high : end - first);
      T* weights = weights_.get() + r * kKeyTile;
      if (from >= to) {
        std::memset(weights, 0, columns * sizeof(T));
        continue;
      }
      float* scores = scores_.get() + r * kKeyTile;
      if (p_.softcap > 0.0f) cap(scores, from, to);
      soften_row(scores, weights, from, to, static_cast<int>(columns), sums.maximum + r, sums.total + r,
                 sums.o + r * width_);
    }
  }

  void cap(float* scores, int from, int to) const {
    const float in = p_.scale / p_.softcap, out = p_.softcap / p_.scale;
    for (int i = from / kLanes * kLanes; i < to; i += kLanes) store(scores + i, tanh(load(scores + i) * in) * out);
  }

  // One row of the tile: keys [from, to) of `columns` count.
  void soften_row(float* scores, T* weights, int from, int to, int columns, float* maximum, float* total, float* o) {
    const float scale = p_.scale * kLog2e;
    const int begin = from / kLanes * kLanes, end = (to + kLanes - 1) / kLanes * kLanes;
    hide(scores + begin, 0, from - begin);
    hide(scores + end - kLanes, to - end + kLanes, kLanes);
    Floats best = load(scores + begin);
    for (int i = begin + kLanes; i < end; i += kLanes) best = max(best, load(scores + i));
    const float top = std::fmax(*maximum, reduce_max(best) * scale);
    if (top > *maximum && *total > 0.0f) {
      const float keep = std::exp2(*maximum - top);
      *total *= keep;
      scale_row(o, width_, keep);
    }
    *maximum = top;
    Floats sum{};
    for (int i = 0; i < begin; i += kLanes) store(weights + i, Floats{});
    for (int i = begin; i < end; i += kLanes) {
      const Floats weight = exp2<std::is_same_v<T, bf16> ? 3 : 5>(load(scores + i) * scale - top);
      sum = sum + weight;
      store(weights + i, weight);
    }
    for (int i = end; i < columns; i += kLanes) store(weights + i, Floats{});
    *total += reduce_add(sum);
  }

  static void hide(float* scores, int from, int to) {
    if (from >= to) return;
    const Ints lane = lane_numbers();
    store(scores, ((lane >= from) & (lane < to)) ? Floats{} + kNothing : load(scores));
  }
};

}  // namespace chairlift
