// Writing, copying and reading the paged KV cache.
#include "cache.h"

namespace chairlift {
namespace {

// Tokens per task: a write is about 100 ns per token and head, a task switch less than that.
constexpr int64_t kWriteGrain = 16;

template <class T>
void write(const CacheLayer<T>& layer, const T* key, int64_t key_stride, const T* value,
           int64_t value_stride, const int64_t* slots, int64_t tokens, int threads) {
  parallel_ranges(threads, tokens, kWriteGrain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (slots[token] < 0) continue;
      for (int64_t head = 0; head < layer.heads; ++head) {
        layer.write_key(slots[token], head, key + token * key_stride + head * layer.key_dim);
        layer.write_value(slots[token], head, value + token * value_stride + head * layer.value_dim);
      }
    }
  });
}

template <class T>
void read(const CacheLayer<T>& layer, int64_t block, T* key, T* value) {
  for (int64_t place = 0; place < layer.block_size; ++place)
    for (int64_t head = 0; head < layer.heads; ++head) {
      for (int64_t dim = 0; dim < layer.key_dim; ++dim)
        *key++ = layer.keys(block, head)[layer.key_offset(place, dim)];
      for (int64_t dim = 0; dim < layer.value_dim; ++dim)
        *value++ = layer.values(block, head)[layer.value_offset(place, dim)];
    }
}

}  // namespace
}  // namespace chairlift

using namespace chairlift;

// key, value [tokens, heads, dim]: heads contiguous, tokens at the given strides; slot -1 skips one.
CHAIRLIFT_EXPORT void chairlift_write(void* base, int64_t heads, int64_t key_dim, int64_t value_dim,
                                      int64_t block_size, const void* key, int64_t key_stride,
                                      const void* value, int64_t value_stride, const int64_t* slots,
                                      int64_t tokens, int is_float, int threads) {
  if (is_float)
    write<float>({static_cast<float*>(base), heads, key_dim, value_dim, block_size},
                 static_cast<const float*>(key), key_stride, static_cast<const float*>(value),
                 value_stride, slots, tokens, threads);
  else
    write<bf16>({static_cast<bf16*>(base), heads, key_dim, value_dim, block_size},
                static_cast<const bf16*>(key), key_stride, static_cast<const bf16*>(value),
                value_stride, slots, tokens, threads);
}

// key [block_size, heads, key_dim] and value [block_size, heads, value_dim] of one block.
CHAIRLIFT_EXPORT void chairlift_read(void* base, int64_t heads, int64_t key_dim, int64_t value_dim,
                                     int64_t block_size, int64_t block, void* key, void* value,
                                     int is_float) {
  if (is_float)
    read<float>({static_cast<float*>(base), heads, key_dim, value_dim, block_size}, block,
                static_cast<float*>(key), static_cast<float*>(value));
  else
    read<bf16>({static_cast<bf16*>(base), heads, key_dim, value_dim, block_size}, block,
               static_cast<bf16*>(key), static_cast<bf16*>(value));
}

// pairs [count, 2] of (source, destination) blocks, copied in order in every layer.
CHAIRLIFT_EXPORT void chairlift_copy_blocks(const int64_t* bases, const int64_t* block_bytes,
                                            int64_t layers, const int64_t* pairs, int64_t count,
                                            int threads) {
  parallel_ranges(threads, layers, 1, [&](int64_t layer, int64_t) {
    char* base = reinterpret_cast<char*>(bases[layer]);
    const int64_t bytes = block_bytes[layer];
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(base + pairs[2 * i + 1] * bytes, base + pairs[2 * i] * bytes, bytes);
  });
}
