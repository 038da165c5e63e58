// Paged attention for a mixed batch of prompt chunks and decoding rows, shared out over threads.
#include "attention.h"

#include <vector>

namespace chairlift {
namespace {

constexpr int64_t kEnough = 4;  // items per thread: with fewer a thread may be left idle at the end

template <class T>
class Planner {
 public:
  Planner(const Problem<T>& problem, int64_t sequences, int threads) : p_(problem) {
    // Prompt chunks first: they are the long items, and decoding rows then level out the threads.
    int64_t decoding = 0;
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
      if (p_.starts[sequence + 1] - p_.starts[sequence] > 1) add(sequence, 1);
      decoding += p_.starts[sequence + 1] - p_.starts[sequence] == 1;
    }
    const int64_t together = decoding >= kEnough * threads ? most_together() : 1;
    for (int64_t sequence = 0; sequence < sequences; ++sequence)
      if (p_.starts[sequence + 1] - p_.starts[sequence] == 1) add(sequence, together);
  }

  std::vector<Item> items;

 private:
  const Problem<T>& p_;

  // KV heads whose rows of one token fit into an item. Sixteen rows and fewer only: with more the matrix
  // unit works on whole tiles, and would write into the rows of the next head.
  int64_t most_together() const {
    const int64_t group = p_.heads / p_.cache.heads;
    if (group > 16 || group > Matmul<T>::kMaxRows) return 1;
    const int64_t most = kItemRows<T> / group;
    return most < p_.cache.heads ? most : p_.cache.heads;
  }

  void add(int64_t sequence, int64_t together) {
    const int64_t group = p_.heads / p_.cache.heads;
    const int64_t heads = group < kItemRows<T> ? group : kItemRows<T>;
    for (int64_t kv_head = 0; kv_head < p_.cache.heads; kv_head += together)
      for (int64_t head = 0; head < group; head += heads) {
        const int64_t kv_heads = p_.cache.heads - kv_head < together ? p_.cache.heads - kv_head : together;
        add_tokens(sequence, kv_head, kv_heads, kv_head * group + head, group - head < heads ? group - head : heads);
      }
  }

  // Latest tokens first: they attend to the most keys.
  void add_tokens(int64_t sequence, int64_t kv_head, int64_t kv_heads, int64_t first_head, int64_t heads) {
    const int64_t begin = p_.starts[sequence], step = kItemRows<T> / heads;
    for (int64_t end = p_.starts[sequence + 1]; end > begin; end -= step) {
      const int64_t token = end - step > begin ? end - step : begin;
      Item item{};
      item.sequence = static_cast<int32_t>(sequence);
      item.kv_head = static_cast<int32_t>(kv_head);
      item.kv_heads = static_cast<int32_t>(kv_heads);
      item.first_head = static_cast<int32_t>(first_head);
      item.heads = static_cast<int32_t>(heads);
      item.token = static_cast<int32_t>(token);
      item.tokens = static_cast<int32_t>(end - token);
      item.from = p_.first_key(p_.position(sequence, token));
      item.to = p_.position(sequence, end - 1) + 1;
      item.partial = -1;
      items.push_back(item);
    }
  }
};

int64_t segments(const Item& item) {
  return item.from < item.to ? (item.to - 1) / kSegment - item.from / kSegment + 1 : 1;
}

// Cuts every item at the segment borders; those of an item of several get a place for a partial result.
std::vector<Item> cut(const std::vector<Item>& items, int64_t* partials) {
  std::vector<Item> shares;
  for (const Item& item : items) {
    const int64_t count = segments(item);
    Item share = item;
    for (int64_t i = 0; i < count; ++i, share.from = share.to) {
      share.to = segment_end(share.from, item.to);
      share.partial = count > 1 ? (*partials)++ : -1;
      shares.push_back(share);
    }
  }
  return shares;
}

const Item* item_at(const std::vector<Item>& items, int64_t index) {
  return index < static_cast<int64_t>(items.size()) ? &items[index] : nullptr;
}

template <class T>
void attend_whole(const Problem<T>& p, const std::vector<Item>& items, int threads) {
  parallel_tasks(threads, static_cast<int64_t>(items.size()), [&] {
    return [&, worker = AttentionWorker<T>(p)](int64_t task, int64_t next) mutable {
      finish(p, items[task], worker.run(items[task], item_at(items, next)));
    };
  });
}

// A few long rows: their segments go to different threads and are merged afterwards, in the order in
// which attend_whole() merges them.
template <class T>
void attend_shares(const Problem<T>& p, const std::vector<Item>& items, int threads) {
  constexpr int64_t rows = kItemRows<T>;
  int64_t count = 0;
  const std::vector<Item> shares = cut(items, &count);
  const int64_t width = round_up(p.cache.value_dim, kPair), size = Sums::elements(rows, width);
  const Buffer<float> partials = make_buffer<float>(count * size);
  parallel_tasks(threads, static_cast<int64_t>(shares.size()), [&] {
    return [&, worker = AttentionWorker<T>(p)](int64_t task, int64_t next) mutable {
      const Item& share = shares[task];
      const Sums sums = worker.run(share, item_at(shares, next));
      if (share.partial < 0) return finish(p, share, sums);
      std::memcpy(partials.get() + share.partial * size, sums.o, size * sizeof(float));
    };
  });
  float* at = partials.get();
  for (const Item& item : items) {
    const int64_t parts = segments(item);
    if (parts == 1) continue;
    const Sums whole = Sums::at(at, rows, width);
    for (int64_t part = 1; part < parts; ++part)
      whole.merge(Sums::at(at + part * size, rows, width), item.rows());
    finish(p, item, whole);
    at += parts * size;
  }
}

template <class T>
void attend(const Problem<T>& p, int64_t sequences, int threads) {
  const std::vector<Item> items = Planner<T>(p, sequences, threads).items;
  if (threads > 1 && static_cast<int64_t>(items.size()) < kEnough * threads)
    attend_shares(p, items, threads);
  else
    attend_whole(p, items, threads);
}

}  // namespace
}  // namespace chairlift

using namespace chairlift;

// q and out [tokens, heads, dim] at the given strides; sinks [heads] or null; window 0 and softcap 0: none.
CHAIRLIFT_EXPORT void chairlift_attend(const void* q, int64_t q_token, int64_t q_head, void* out,
                                       int64_t out_token, int64_t out_head, void* base,
                                       int64_t kv_heads, int64_t key_dim, int64_t value_dim,
                                       int64_t block_size, const int32_t* tables,
                                       int64_t table_width, const int32_t* starts,
                                       const int32_t* lengths, int64_t sequences, int64_t heads,
                                       float scale, int64_t window, float softcap,
                                       const float* sinks, int is_float, int threads) {
  const auto solve = [&](auto* cache) {
    using T = std::remove_pointer_t<decltype(cache)>;
    const Problem<T> problem{static_cast<const T*>(q), q_token, q_head, static_cast<T*>(out), out_token, out_head,
                             {cache, kv_heads, key_dim, value_dim, block_size}, tables, table_width, starts,
                             lengths, heads, scale, window, softcap, sinks};
    attend(problem, sequences, threads);
  };
  if (is_float)
    solve(static_cast<float*>(base));
  else
    solve(static_cast<bf16*>(base));
}
