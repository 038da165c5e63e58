// One layer of the paged KV cache, laid out for the matrix kernel (matmul.h).
//
// [block][KV head][keys | values]. Keys: a panel per 16 keys, whose k is the head dimension (padded
// to 32 with zeros). Values: a panel per 16 head dimensions, whose k is the key's place in the block.
#pragma once

#include "matmul.h"

namespace chairlift {

template <class T>
struct CacheLayer {
  T* base;
  int64_t heads, key_dim, value_dim, block_size;

  int64_t key_depth() const { return round_up(key_dim, kStep); }
  int64_t value_columns() const { return round_up(value_dim, kLanes); }
  int64_t head_elements() const { return block_size * (key_depth() + value_columns()); }

  T* keys(int64_t block, int64_t head) const {
    return base + (block * heads + head) * head_elements();
  }
  T* values(int64_t block, int64_t head) const {
    return keys(block, head) + block_size * key_depth();
  }

  // The 16-key group that holds `place` (a multiple of 16) of a block.
  const T* key_group(int64_t block, int64_t head, int64_t place) const {
    return keys(block, head) + place * key_depth();
  }
  // Sixteen keys of one panel of values: kLanes * kLanes elements.
  const T* value_group(int64_t block, int64_t head, int64_t panel, int64_t place) const {
    return values(block, head) + (panel * block_size + place) * kLanes;
  }

  // Where element `dim` of the key or value at `place` lies, from keys() or values().
  int64_t key_offset(int64_t place, int64_t dim) const {
    constexpr int64_t pack = kPack<T>;
    return place / kLanes * kLanes * key_depth() + dim / pack * pack * kLanes +
           place % kLanes * pack + dim % pack;
  }
  int64_t value_offset(int64_t place, int64_t dim) const {
    constexpr int64_t pack = kPack<T>;
    return dim / kLanes * kLanes * block_size + place / pack * pack * kLanes +
           dim % kLanes * pack + place % pack;
  }

  // The padding is written too: nothing the kernel multiplies is ever left uninitialised.
  void write_key(int64_t slot, int64_t head, const T* key) const {
    constexpr int64_t pack = kPack<T>;
    T* to = keys(slot / block_size, head) + key_offset(slot % block_size, 0);
    int64_t dim = 0;
    for (; dim + pack <= key_dim; dim += pack, to += pack * kLanes) std::memcpy(to, key + dim, pack * sizeof(T));
    for (; dim < key_depth(); dim += pack, to += pack * kLanes)
      for (int64_t i = 0; i < pack; ++i) to[i] = dim + i < key_dim ? key[dim + i] : T{};
  }
  void write_value(int64_t slot, int64_t head, const T* value) const {
    constexpr int64_t pack = kPack<T>;
    T* to = values(slot / block_size, head) + value_offset(slot % block_size, 0);
    for (int64_t dim = 0; dim < value_dim; dim += kLanes, to += kLanes * block_size)
      for (int64_t i = 0; i < kLanes && dim + i < value_dim; ++i) to[i * pack] = value[dim + i];
  }
};

}  // namespace chairlift
