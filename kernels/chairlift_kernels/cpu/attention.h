// Flash-style attention of one work item over the paged cache: scores, softmax and values per key tile.
//
// An item is a few queries of one sequence times the query heads that share a KV head; its matrix rows
// are (token, head) pairs, so each K and V tile is read once for all of them. Keys are walked in tiles
// and segments whose borders depend on the key's position alone, and segments are merged in order: a
// token's result is the same bits whatever the batch, the chunking of its prompt, or the thread count.
#pragma once

#include "cache.h"
#include "softmax.h"

namespace chairlift {

constexpr int kKeyTile = 128;  // keys per softmax step: scores of 32 rows are then a third of L1
constexpr int kSegment = 512;  // keys between merges: the unit a long row is split over threads by

template <class T>
constexpr int kItemRows = Matmul<T>::kMaxRows < 16 ? 4 * Matmul<T>::kMaxRows : 64;

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
  int64_t block(int64_t sequence, int64_t key) const {
    return tables[sequence * table_width + key / cache.block_size];
  }
};

struct Item {
  int32_t sequence, kv_head, first_head, heads, token, tokens;
  int64_t from, to;  // keys
  int64_t partial;   // place in the partial results, for a share of a longer item
  int rows() const { return heads * tokens; }
  int64_t token_of(int row) const { return token + row / heads; }
  int64_t head_of(int row) const { return first_head + row % heads; }
};

inline int64_t segment_end(int64_t from, int64_t to) {
  const int64_t end = (from / kSegment + 1) * kSegment;
  return end < to ? end : to;
}

// Divides by the denominator (a sink adds one key without a value to it) and writes the rows out.
template <class T>
void finish(const Problem<T>& p, const Item& item, const Sums& sums) {
  for (int r = 0; r < item.rows(); ++r) {
    float total = reduce_add(load(sums.totals + r * kLanes)), unit = 1.0f;
    if (p.sinks) {
      const float sink = p.sinks[item.head_of(r)] * kLog2e, top = std::fmax(sink, sums.maxima[r]);
      unit = std::exp2(sums.maxima[r] - top);
      total = total * unit + std::exp2(sink - top);
    }
    const float factor = total > 0.0f ? unit / total : 0.0f;
    T* out = p.out + item.token_of(r) * p.out_token + item.head_of(r) * p.out_head;
    for (int64_t i = 0; i < p.cache.value_dim; i += kLanes)
      store_some(out + i, load(sums.o + r * sums.width + i) * factor, lanes_left(p.cache.value_dim, i));
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
        scores_(make_buffer<float>(kBlock * kKeyTile)),
        weights_(make_buffer<T>(kBlock * kKeyTile)),
        values_(make_buffer<T>(problem.cache.value_columns() * kKeyTile)),
        state_(make_buffer<float>(2 * Sums::elements(kRows, width_))) {}

  // The item's result, which lives until the next call. `following` is the item that comes next, or null:
  // its first keys are fetched while the last ones of this item are worked on.
  Sums run(const Item& item, const Item* following) {
    load_queries(item);
    const Sums whole = Sums::at(state_.get(), kRows, width_);
    const Sums part = Sums::at(state_.get() + Sums::elements(kRows, width_), kRows, width_);
    int64_t from = segment_end(item.from, item.to);
    segment(item, following, item.from, from, whole);
    while (from < item.to) {
      const int64_t to = segment_end(from, item.to);
      segment(item, following, from, to, part);
      whole.merge(part, item.rows());
      from = to;
    }
    return whole;
  }

 private:
  static constexpr int kBlock = Matmul<T>::kMaxRows;  // rows per pass over a tile

  struct Tile {  // keys [first, end); first is a multiple of 16
    int64_t first, end;
    int steps() const { return static_cast<int>(ceil_div(end - first, kStep)); }
  };

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
      T* to = q_.get() + r * depth_;
      std::memcpy(to, p_.q + item.token_of(r) * p_.q_token + item.head_of(r) * p_.q_head, dim * sizeof(T));
      std::memset(to + dim, 0, (depth_ - dim) * sizeof(T));
    }
  }

  void segment(const Item& item, const Item* following, int64_t from, int64_t to, const Sums& sums) {
    sums.clear(item.rows());
    while (from < to) {
      const int64_t border = (from / kKeyTile + 1) * kKeyTile;
      const Tile tile{from / kLanes * kLanes, border < to ? border : to};
      load_values(item, tile);
      for (int row = 0; row < item.rows(); row += kBlock) {
        const int left = item.rows() - row, rows = left < kBlock ? left : kBlock;
        score(item, tile, row, whole_tiles(rows), row == 0 ? following : &item);
        soften(item, tile, row, rows, sums);
        add_values(tile, row, whole_tiles(rows), sums);
      }
      from = tile.end;
    }
  }

  // Above 16 rows the tile unit works on whole tiles: spare rows hold leftovers that nobody reads.
  static int whole_tiles(int rows) {
    return kBlock > 16 && rows > 16 ? static_cast<int>(round_up(rows, 16)) : rows;
  }

  void score(const Item& item, const Tile& tile, int row, int rows, const Item* following) {
    const int64_t size = p_.cache.block_size;
    for (int64_t key = tile.first; key < tile.end; key += kPair) {
      const int64_t other = key + kLanes < tile.end ? key + kLanes : key;
      if (row == 0) fetch_ahead(item, tile, key - tile.first, following);
      const Panels<T> keys{p_.cache.key_group(p_.block(item.sequence, key), item.kv_head, key % size),
                           p_.cache.key_group(p_.block(item.sequence, other), item.kv_head, other % size), kTile};
      matmul_.run(q_.get() + row * depth_, depth_, rows, keys, static_cast<int>(depth_ / kStep),
                  scores_.get() + (key - tile.first), kKeyTile, false);
    }
  }

  // The pair of key groups `offset` keys into the next tile, of this item or the following one.
  void fetch_ahead(const Item& item, const Tile& tile, int64_t offset, const Item* following) const {
    const Item* next = tile.end < item.to ? &item : following;
    if (!next) return;
    const int64_t start = next == &item ? tile.end : next->from / kLanes * kLanes;
    for (int64_t key = start + offset; key < start + offset + kPair && key < next->to; key += kLanes) {
      const int64_t block = p_.block(next->sequence, key), place = key % p_.cache.block_size;
      prefetch_lines(p_.cache.key_group(block, next->kv_head, place), static_cast<int>(depth_ * kLanes * sizeof(T) / 64));
      for (int64_t panel = 0; panel < p_.cache.value_columns() / kLanes; ++panel)
        prefetch_lines(p_.cache.value_group(block, next->kv_head, panel, place), kLanes * kLanes * sizeof(T) / 64);
    }
  }

  // Panels of the tile's values, 128 keys long, zero where there is no key: 0 x NaN would be NaN.
  void load_values(const Item& item, const Tile& tile) {
    constexpr int64_t group = kLanes * kLanes;
    const int64_t panels = p_.cache.value_columns() / kLanes;
    for (int64_t key = tile.first; key < tile.first + tile.steps() * kStep; key += kLanes) {
      T* to = values_.get() + (key - tile.first) * kLanes;
      const int64_t present = tile.end - key;
      const int64_t block = present > 0 ? p_.block(item.sequence, key) : 0;
      for (int64_t panel = 0; panel < panels; ++panel, to += kKeyTile * kLanes) {
        if (present > 0)
          std::memcpy(to, p_.cache.value_group(block, item.kv_head, panel, key % p_.cache.block_size), group * sizeof(T));
        if (present < kLanes) blank_from(to, present > 0 ? present : 0);
      }
    }
  }

  static void blank_from(T* group, int64_t present) {
    constexpr int64_t pack = kPack<T>;
    for (int64_t key = present; key < kLanes; ++key)
      for (int64_t dim = 0; dim < kLanes; ++dim) group[key / pack * pack * kLanes + dim * pack + key % pack] = T{};
  }

  void soften(const Item& item, const Tile& tile, int row, int rows, const Sums& sums) {
    for (int r = 0; r < rows; ++r) {
      const int64_t position = p_.position(item.sequence, item.token_of(row + r));
      const int64_t low = p_.first_key(position), high = position + 1;
      const Span seen{static_cast<int>(low > tile.first ? low - tile.first : 0),
                      static_cast<int>((high < tile.end ? high : tile.end) - tile.first)};
      float* scores = scores_.get() + r * kKeyTile;
      T* weights = weights_.get() + r * kKeyTile;
      if (seen.from >= seen.to) {
        std::memset(weights, 0, tile.steps() * kStep * sizeof(T));
        continue;
      }
      if (p_.softcap > 0.0f) cap_scores(scores, seen, p_.scale, p_.softcap);
      soften_row(scores, weights, seen, tile.steps() * kStep, p_.scale * kLog2e, sums, row + r);
    }
  }

  void add_values(const Tile& tile, int row, int rows, const Sums& sums) {
    constexpr int64_t panel = kKeyTile * kLanes;
    for (int64_t column = 0; column < width_; column += kPair) {
      const T* values = values_.get() + column / kLanes * panel;
      const bool both = column + kLanes < p_.cache.value_columns();
      matmul_.run(weights_.get(), kKeyTile, rows, {values, both ? values + panel : values, kTile}, tile.steps(),
                  sums.o + row * width_ + column, width_, true);
    }
  }
};

}  // namespace chairlift
