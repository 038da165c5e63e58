// The values of a key tile as the matrix kernel reads them: in the cache, or gathered where they are not whole.
#pragma once

#include "cache.h"

namespace chairlift {

constexpr int kKeyTile = 128;  // keys per softmax step: the scores of 32 rows are then a third of L1

struct KeyTile {
  int64_t first, end;  // first is a multiple of ValueTiles::grain()
  int steps() const { return static_cast<int>(ceil_div(end - first, kStep)); }
};

// Blocks of whole 32-key steps are read in place, all but a last step that reaches past the last key:
// there, and in smaller blocks, values are copied, with zeros for keys that do not exist (0 x NaN is NaN).
template <class T>
class ValueTiles {
 public:
  explicit ValueTiles(const CacheLayer<T>& cache)
      : cache_(cache),
        whole_(cache.block_size % kStep == 0),
        panels_(cache.value_columns() / kLanes),
        distance_(whole_ ? cache.block_size * kLanes : kTile),
        copies_(make_buffer<T>(panels_ * distance_ * (whole_ ? 1 : kKeyTile / kStep))) {}

  // What the first key of a tile is a multiple of.
  int64_t grain() const { return whole_ ? kStep : kLanes; }

  // Finds the tile's values; block_of(key) is the block that holds a key.
  template <class BlockOf>
  void locate(const KeyTile& keys, int64_t head, BlockOf&& block_of) {
    T* copy = copies_.get();
    for (int step = 0; step < keys.steps(); ++step) {
      const int64_t key = keys.first + step * kStep;
      if (whole_ && key + kStep <= keys.end) {
        tiles_[step] = cache_.value_group(block_of(key), head, 0, key % cache_.block_size);
        continue;
      }
      tiles_[step] = copy;
      for (int64_t group = 0; group < kStep; group += kLanes)
        gather(copy + group * kLanes, keys.end - key - group, key + group, head, block_of);
      copy += panels_ * distance_;
    }
  }

  // The two panels from head dimension `column` on; past the last one the first stands in.
  ListedPanels<T> panels(int64_t column) const {
    const int64_t panel = column / kLanes;
    return {tiles_, panel * distance_, panel + 1 < panels_ ? distance_ : 0};
  }

 private:
  const CacheLayer<T>& cache_;
  const bool whole_;
  const int64_t panels_, distance_;
  Buffer<T> copies_;
  const T* tiles_[kKeyTile / kStep];

  // Sixteen keys of every panel, of which `present` exist.
  template <class BlockOf>
  void gather(T* to, int64_t present, int64_t key, int64_t head, BlockOf&& block_of) {
    constexpr int64_t group = kLanes * kLanes;
    const int64_t block = present > 0 ? block_of(key) : 0;
    for (int64_t panel = 0; panel < panels_; ++panel, to += distance_) {
      if (present > 0)
        std::memcpy(to, cache_.value_group(block, head, panel, key % cache_.block_size), group * sizeof(T));
      for (int64_t missing = present > 0 ? present : 0; missing < kLanes; ++missing) blank(to, missing);
    }
  }

  static void blank(T* group, int64_t key) {
    constexpr int64_t pack = kPack<T>;
    for (int64_t dim = 0; dim < kLanes; ++dim) group[key / pack * pack * kLanes + dim * pack + key % pack] = T{};
  }
};

}  // namespace chairlift
