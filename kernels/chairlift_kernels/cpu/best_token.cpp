// The best token of each row of logits: the lowest index of the largest value, where a NaN is larger than all.
#include "parallel.h"
#include "vector.h"

namespace chairlift {
namespace {

constexpr int64_t kStretch = 64 * kLanes;  // elements whose maximum says whether to look at each
constexpr int64_t kGrain = 16384;          // elements per task, some 2 us

struct Best {
  int64_t place;
  float value;
};

// Whether whole lanes of a row hold a larger value, a NaN, or an infinity.
template <class T>
bool worth_a_look(const T* from, int64_t count, float best) {
  Floats most = splat(best), sum{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats v = load(from + i);
    most = max(most, v);
    sum = sum + v * 0.0f;
  }
  return reduce_max(most) > best || reduce_add(sum) != 0.0f;  // also where the sum is a NaN
}

// Looks at each of [begin, end); false where a NaN has ended the search.
template <class T>
bool look(const T* row, int64_t begin, int64_t end, Best& best) {
  for (int64_t i = begin; i < end; ++i) {
    const float value = to_float(row[i]);
    if (value > best.value || value != value) best = {i, value};
    if (value != value) return false;
  }
  return true;
}

template <class T>
Best best_of(const T* row, int64_t width) {
  Best best{0, to_float(row[0])};
  const int64_t whole = width / kLanes * kLanes;
  for (int64_t begin = 0; begin < whole; begin += kStretch) {
    const int64_t end = begin + kStretch < whole ? begin + kStretch : whole;
    if (worth_a_look(row + begin, end - begin, best.value) && !look(row, begin, end, best)) return best;
  }
  look(row, whole, width, best);
  return best;
}

template <class T>
void best_tokens(const T* logits, int64_t stride, int64_t rows, int64_t width, int64_t* ids, float* values,
                 int threads) {
  parallel_ranges(threads, rows, ceil_div(kGrain, width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Best best = best_of(logits + row * stride, width);
      ids[row] = best.place;
      values[row] = best.value;
    }
  });
}

}  // namespace
}  // namespace chairlift

using namespace chairlift;

// logits [rows, width] with a row stride -> ids [rows] and their values [rows].
CHAIRLIFT_EXPORT void chairlift_best_token(const void* logits, int64_t stride, int64_t rows, int64_t width,
                                           int64_t* ids, float* values, int is_float, int threads) {
  if (is_float)
    best_tokens(static_cast<const float*>(logits), stride, rows, width, ids, values, threads);
  else
    best_tokens(static_cast<const bf16*>(logits), stride, rows, width, ids, values, threads);
}
