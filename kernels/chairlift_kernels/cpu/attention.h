// Flash-style attention of one work item over the paged cache: scores, softmax and values per key tile.
//
// An item is a few queries of one sequence times the query heads that share a KV head; its matrix rows
// are (token, head) pairs, so each K and V tile is read once for all of them. The few rows of a decoding
// sequence are too short to hide how long the matrix unit takes to start: where there are enough
// sequences, one item takes several KV heads, one after the other. Keys are walked in tiles
// and segments whose borders depend on the key's position alone, and segments are merged in order: a
// token's result is the same bits whatever the batch, the chunking of its prompt, or the thread count.
#pragma once

#include "cache.h"
#include "softmax.h"
#include "values.h"

namespace chairlift {

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
  int32_t sequence, kv_head, kv_heads, first_head, heads, token, tokens;  // heads: of one KV head
  int64_t from, to;  // keys
  int64_t partial;   // place in the partial results, for a share of a longer item
  int head_rows() const { return heads * tokens; }
  int rows() const { return kv_heads * head_rows(); }
  int64_t token_of(int row) const { return token + row % head_rows() / heads; }
  int64_t head_of(int row) const { return first_head + row / head_rows() * heads + row % heads; }
  int64_t kv_head_of(int row) const { return kv_head + row / head_rows(); }
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
    each_lanes(p.cache.value_dim, [&](int64_t i, auto count) {
      store_some(out + i, load(sums.o + r * sums.width + i) * factor, count);
    });
  }
}

// Walks ahead of the computation through the blocks of an item and then of the following one.
template <class T>
class BlockFetcher {
 public:
  explicit BlockFetcher(const Problem<T>& problem) : p_(problem) {}

  void begin(const Item& item, const Item* following) {
    if (item_ != &item) aim(&item, item.from + kKeyTile);  // the first tile is read before it could arrive
    following_ = following && !same_keys(item, *following) ? following : nullptr;
  }

  void fetch() {
    if (lines_ == 0 && !advance()) return;
    const int lines = lines_ < kLinesPerStep ? lines_ : kLinesPerStep;
    prefetch_lines(at_, lines);
    at_ += lines * 64;
    lines_ -= lines;
  }

 private:
  static constexpr int kLinesPerStep = 2 * kTile * sizeof(T) / 64;  // as much as a step reads

  const Problem<T>& p_;
  const Item* item_ = nullptr;
  const Item* following_ = nullptr;
  int64_t key_ = 0;
  const char* at_ = nullptr;
  int lines_ = 0;

  static bool same_keys(const Item& a, const Item& b) { return a.sequence == b.sequence && a.kv_head == b.kv_head; }

  void aim(const Item* item, int64_t key) {
    item_ = item;
    key_ = key / p_.cache.block_size * p_.cache.block_size;
    lines_ = 0;
  }

  bool advance() {
    if (item_ && key_ >= item_->to) aim(following_, following_ ? following_->from : 0);
    if (!item_ || key_ >= item_->to) return false;
    at_ = reinterpret_cast<const char*>(p_.cache.keys(p_.block(item_->sequence, key_), item_->kv_head));
    lines_ = static_cast<int>(item_->kv_heads * p_.cache.head_elements() * sizeof(T) / 64);
    key_ += p_.cache.block_size;
    return true;
  }
};

template <class T>
class AttentionWorker {
 public:
  static constexpr int kRows = kItemRows<T>;

  explicit AttentionWorker(const Problem<T>& problem)
      : p_(problem),
        depth_(problem.cache.key_depth()),
        width_(round_up(problem.cache.value_dim, kPair)),
        values_(problem.cache),
        fetcher_(problem),
        q_(make_buffer<T>(kRows * depth_)),
        scores_(make_buffer<float>(2 * kBlock * kKeyTile)),
        weights_(make_buffer<T>(2 * kBlock * kKeyTile)),
        state_(make_buffer<float>(2 * Sums::elements(kRows, width_))) {}

  // The item's result, which lives until the next call. `following` is the item that comes next, or null:
  // its first keys are fetched while the last ones of this item are worked on.
  Sums run(const Item& item, const Item* following) {
    load_queries(item);
    fetcher_.begin(item, following);
    const Sums whole = Sums::at(state_.get(), kRows, width_);
    const Sums part = Sums::at(state_.get() + Sums::elements(kRows, width_), kRows, width_);
    int64_t from = segment_end(item.from, item.to);
    segment(item, item.from, from, whole);
    while (from < item.to) {
      const int64_t to = segment_end(from, item.to);
      segment(item, from, to, part);
      whole.merge(part, item.rows());
      from = to;
    }
    return whole;
  }

 private:
  static constexpr int kBlock = Matmul<T>::kMaxRows;

  // Some rows of the item against some keys.
  struct Pass {
    KeyTile keys;
    int row, rows;
  };

  const Problem<T>& p_;
  const int64_t depth_, width_;
  ValueTiles<T> values_;
  BlockFetcher<T> fetcher_;
  Buffer<T> q_;
  Buffer<float> scores_;  // of two passes, as the weights
  Buffer<T> weights_;
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

  // While the weights of one pass are computed in vector registers, the matrix unit is given the scores of
  // the next pass and the values of the one before, a piece every few rows. (Alternating in large pieces
  // costs about 0.25 us per change on Sapphire Rapids.) An item of one pass per tile adds its values at
  // once: the next pass rescales the same rows.
  void segment(const Item& item, int64_t from, int64_t to, const Sums& sums) {
    sums.clear(item.rows());
    if (from >= to) return;
    const int columns = static_cast<int>(width_ / kPair);
    Pass before{}, now = pass_at(item, from, to, 0);
    for (int i = 0; i < now.keys.steps(); ++i) score(item, now, i, 0);
    const bool alone = item.kv_heads == 1 && item.rows() <= kBlock;
    for (int buffer = 0;; buffer ^= 1) {
      const bool rows_left = now.row + now.rows < item.rows(), more = rows_left || now.keys.end < to;
      const Pass next = rows_left ? pass_at(item, now.keys.first, now.keys.end, now.row + now.rows)
                                  : pass_at(item, now.keys.end, to, 0);
      const int adds = before.rows ? columns : 0, scores = more ? next.keys.steps() : 0;
      soften(item, now, buffer, sums, adds + scores, [&](int piece) {
        if (piece < adds)
          add_values(item, before, piece, buffer ^ 1, sums);
        else
          score(item, next, piece - adds, buffer ^ 1);
      });
      before = now;
      if (!more || alone) {
        for (int i = 0; i < columns; ++i) add_values(item, now, i, buffer, sums);
        before.rows = 0;
      }
      if (!more) return;
      now = next;
    }
  }

  Pass pass_at(const Item& item, int64_t from, int64_t to, int row) const {
    const int64_t border = (from / kKeyTile + 1) * kKeyTile, first = from / values_.grain() * values_.grain();
    const int left = item.head_rows() - row % item.head_rows();
    return {{first, border < to ? border : to}, row, left < kBlock ? left : kBlock};
  }

  // Above 16 rows the tile unit works on whole tiles: spare rows hold leftovers that nobody reads.
  static int whole_tiles(int rows) {
    return kBlock > 16 && rows > 16 ? static_cast<int>(round_up(rows, 16)) : rows;
  }

  // Queries x the 32 keys of piece `i`.
  void score(const Item& item, const Pass& pass, int i, int buffer) {
    const int64_t key = pass.keys.first + i * kPair, size = p_.cache.block_size;
    const int64_t other = key + kLanes < pass.keys.end ? key + kLanes : key;
    const int64_t head = item.kv_head_of(pass.row);
    const EvenPanels<T> keys{p_.cache.key_group(p_.block(item.sequence, key), head, key % size),
                             p_.cache.key_group(p_.block(item.sequence, other), head, other % size), kTile};
    matmul_.template run<Rows::kKept>(q_.get() + pass.row * depth_, depth_, whole_tiles(pass.rows), keys,
                                      static_cast<int>(depth_ / kStep),
                                      scores_.get() + buffer * kBlock * kKeyTile + i * kPair, kKeyTile, false,
                                      fetcher_);
  }

  // Calls between(0), ..., between(pieces - 1) spread over the rows.
  template <class Between>
  void soften(const Item& item, const Pass& pass, int buffer, const Sums& sums, int pieces, Between&& between) {
    const KeyTile& keys = pass.keys;
    for (int r = 0, piece = 0; r < pass.rows; ++r) {
      const int64_t position = p_.position(item.sequence, item.token_of(pass.row + r));
      const int64_t low = p_.first_key(position), high = position + 1;
      const Span seen{static_cast<int>(low > keys.first ? low - keys.first : 0),
                      static_cast<int>((high < keys.end ? high : keys.end) - keys.first)};
      float* scores = scores_.get() + (buffer * kBlock + r) * kKeyTile;
      T* weights = weights_.get() + (buffer * kBlock + r) * kKeyTile;
      if (seen.from < seen.to) {
        if (p_.softcap > 0.0f) cap_scores(scores, seen, p_.scale, p_.softcap);
        soften_row(scores, weights, seen, keys.steps() * kStep, p_.scale * kLog2e, sums, pass.row + r);
      } else {
        std::memset(weights, 0, keys.steps() * kStep * sizeof(T));
      }
      while (piece * pass.rows < (r + 1) * pieces) between(piece++);
    }
  }

  // sums.o += weights x values, 32 head dimensions of them
  void add_values(const Item& item, const Pass& pass, int i, int buffer, const Sums& sums) {
    if (pass.row % item.head_rows() == 0 && i == 0)
      values_.locate(pass.keys, item.kv_head_of(pass.row), [&](int64_t key) { return p_.block(item.sequence, key); });
    matmul_.template run<Rows::kKept>(weights_.get() + buffer * kBlock * kKeyTile, kKeyTile, whole_tiles(pass.rows),
                                      values_.panels(i * kPair), pass.keys.steps(),
                                      sums.o + pass.row * width_ + i * kPair, width_, true, fetcher_);
  }
};

}  // namespace chairlift
