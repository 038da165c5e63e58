// Packed bf16 linear layers: y = x W^T (+ bias) (+ residual), and act(x G^T) * (x U^T) for gated MLPs.
//
// Packed weight: [pair of panels][k / 32][2 panels][tile], so one pair is one contiguous stream read exactly once per
// row block. While a pair is being multiplied the next one is fetched, a slice per row block, and with a thread's last
// pair the first one of the following layer: memory would else be idle until that layer is under way.
#include "linear.h"

#include "matmul.h"

namespace chairlift {
namespace {

// Rows multiplied against a pair before moving to the next pair.
constexpr int64_t kRowChunk = 256;

// Steps of a pair that stay in an L1 of 48 KB (36 KB of it) while the rows go by. Longer ones are cut into equal
// pieces: k 1536 at 512 rows took 1.2 times as long whole, and 16 and 24 steps were no better.
constexpr int64_t kStepsInL1 = 18;

// Threads take tasks in turn. Two neighbouring pairs of a gated layer write to one cache line, which would go
// to and fro between two threads (at 512 rows the second one then gained nothing): let a thread have both.
int64_t pair_of(int64_t task, int64_t pairs, int threads) {
  const int64_t turn = task % pairs, round = turn / (2 * threads) * (2 * threads), place = turn - round;
  return round + 2 * threads > pairs ? turn : round + place % threads * 2 + place / threads;
}

struct Job {
  const bf16* x;
  int64_t ldx, rows;
  const bf16* packed;
  int64_t steps, pairs, columns;  // columns of the output
  const NextWeights* following;
  int threads;

  int64_t tasks() const { return pairs * ceil_div(rows, kRowChunk); }

  // What a thread reads after its task: of this weight, or what it begins the following one with.
  Stream stream(int64_t next, int thread, int64_t fetches) const {
    if (next < tasks()) return stream_of(packed, pair_of(next, pairs, threads), steps, fetches);
    if (!following || thread >= following->pairs) return {nullptr, 0};
    return stream_of(following->packed, pair_of(thread, following->pairs, threads), ceil_div(following->k, kStep),
                     fetches);
  }

 private:
  static Stream stream_of(const bf16* weights, int64_t pair, int64_t steps, int64_t fetches) {
    const int64_t elements = steps * 2 * kTile;
    return {reinterpret_cast<const char*>(weights + pair * elements),
            static_cast<int>(ceil_div(elements * sizeof(bf16) / 64, fetches))};
  }
};

// Panel `slot` of the packed weight: slots 2p and 2p + 1 form pair p.
bf16* panel_at(bf16* packed, int64_t slot, int64_t steps) {
  return packed + (slot / 2) * steps * 2 * kTile + (slot % 2) * kTile;
}

void pack_panel(const bf16* weight, int64_t columns, int64_t k, int64_t ld, bf16* panel) {
  for (int64_t step = 0; step < ceil_div(k, kStep); ++step, panel += 2 * kTile)
    for (int64_t i = 0; i < kStep; ++i)
      for (int64_t column = 0; column < kLanes; ++column) {
        const int64_t depth = step * kStep + i;
        const bool inside = depth < k && column < columns;
        panel[(i / 2) * 2 * kLanes + column * 2 + i % 2] = inside ? weight[column * ld + depth] : bf16{0};
      }
}

// Adds bias and residual in fp32 and writes one 32-column strip of the output.
template <class Out>
struct PlainEpilogue {
  const float* bias;
  const bf16* residual;
  Out* out;
  int64_t columns;

  void operator()(const float* c, int64_t row, int rows, int64_t pair) const {
    for (int r = 0; r < rows; ++r)
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t column = pair * kPair + half * kLanes;
        const int count = static_cast<int>(columns - column < kLanes ? columns - column : kLanes);
        if (count <= 0) continue;
        Floats v = load(c + r * kPair + half * kLanes);
        if (bias) v = v + load_some(bias + column, count);
        const int64_t at = (row + r) * columns + column;
        if (residual) v = v + load_some(residual + at, count);
        store_some(out + at, v, count);
      }
  }
};

// A pair is (gate, up) of the same sixteen columns.
struct GatedEpilogue {
  Activation activation;
  bf16* out;
  int64_t ldo, columns;

  void operator()(const float* c, int64_t row, int rows, int64_t pair) const {
    const int64_t column = pair * kLanes;
    const int count = static_cast<int>(columns - column < kLanes ? columns - column : kLanes);
    for (int r = 0; r < rows; ++r) {
      const float* gate = c + r * kPair;
      const Floats v = activate(activation, load(gate)) * load(gate + kLanes);
      store_some(out + (row + r) * ldo + column, v, count);
    }
  }
};

// What a matrix kernel does besides, a slice per step: it fetches the next weights, and writes out the sums of
// the block before while the matrix unit works on this one (a third of a gated layer's time at 512 rows).
template <class Epilogue>
struct Meanwhile {
  Stream ahead;
  const Epilogue& epilogue;
  int slice;  // rows per step
  const float* sums = nullptr;
  int64_t row = 0, pair = 0;
  int rows = 0, done = 0;

  void fetch() {
    ahead.fetch();
    if (done < rows) write(rows - done < slice ? rows - done : slice);
  }
  void write(int count) {
    epilogue(sums + done * kPair, row + done, count, pair);
    done += count;
  }
  void finish() {
    if (done < rows) write(rows - done);
  }
  void hand_over(const float* c, int64_t first, int count, int64_t columns) {
    finish();
    sums = c, row = first, rows = count, pair = columns, done = 0;
  }
};

template <class Epilogue>
class Worker {
 public:
  Worker(const Job& job, const Epilogue& epilogue)
      : job_(job), thread_(thread_number()), meanwhile_{{}, epilogue, static_cast<int>(ceil_div(kMaxRows, job.steps))} {}
  ~Worker() { meanwhile_.finish(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void operator()(int64_t task, int64_t next) {
    const int64_t pair = pair_of(task, job_.pairs, job_.threads), begin = task / job_.pairs * kRowChunk;
    const int64_t end = begin + kRowChunk < job_.rows ? begin + kRowChunk : job_.rows;
    const int64_t blocks = ceil_div(end - begin, kMaxRows);
    const bf16* weight = job_.packed + pair * job_.steps * 2 * kTile;
    meanwhile_.ahead = job_.stream(next, thread_, blocks * job_.steps);
    const int64_t pieces = Matmul<bf16>::kHasOwnUnit && blocks > 2 ? ceil_div(job_.steps, kStepsInL1) : 1;
    const int64_t piece = ceil_div(job_.steps, pieces);
    const int64_t free = meanwhile_.sums == sums_[0];  // the block that is still being written out lies elsewhere
    for (int64_t from = 0; from < job_.steps; from += piece) {
      const int64_t to = from + piece < job_.steps ? from + piece : job_.steps;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t row = first_row(begin, end, block);
        const int rows = static_cast<int>(end - row < kMaxRows ? end - row : kMaxRows);
        float* c = sums_[pieces > 1 ? free + block : (free + block) % 2];
        if (c == meanwhile_.sums) meanwhile_.finish();
        multiply(weight, row, rows, from, to, blocks > 1, c);
        if (to < job_.steps) continue;
        meanwhile_.hand_over(c, row, rows, pair);
        if (!Matmul<bf16>::kHasOwnUnit) meanwhile_.finish();
      }
    }
  }

 private:
  static constexpr int64_t kMaxRows = Matmul<bf16>::kMaxRows;
  static constexpr int64_t kBlocks = Matmul<bf16>::kHasOwnUnit ? kRowChunk / kMaxRows : 1;

  // A last block that is not full starts earlier and computes some rows again, to the same bits: that is
  // cheaper than a kernel of another shape.
  static int64_t first_row(int64_t begin, int64_t end, int64_t block) {
    const int64_t row = begin + block * kMaxRows;
    return row + kMaxRows > end && end - begin >= kMaxRows ? end - kMaxRows : row;
  }

  // Rows x the steps [from, to) of a pair, added to c unless they are the first.
  void multiply(const bf16* weight, int64_t row, int rows, int64_t from, int64_t to, bool pair_is_read_again,
                float* c) {
    const bf16 *x = job_.x + row * job_.ldx + from * kStep, *tiles = weight + from * 2 * kTile;
    const EvenPanels<bf16> panels{tiles, tiles + kTile, 2 * kTile};
    const int steps = static_cast<int>(to - from);
    if (pair_is_read_again)
      matmul_.template run<Rows::kPassing>(x, job_.ldx, rows, panels, steps, c, kPair, from > 0, meanwhile_);
    else
      matmul_.template run<Rows::kKept>(x, job_.ldx, rows, panels, steps, c, kPair, from > 0, meanwhile_);
  }

  const Job& job_;
  const int thread_;
  alignas(64) float sums_[kBlocks + 1][kMaxRows * kPair];
  Meanwhile<Epilogue> meanwhile_;
  Matmul<bf16> matmul_;
};

template <class Epilogue>
void run(Job job, int64_t k, int threads, const Epilogue& epilogue) {
  Buffer<bf16> padded;
  if (k % kStep) {  // the kernel reads whole steps: give the rows zeros to read
    const int64_t depth = job.steps * kStep;
    padded = make_buffer<bf16>(job.rows * depth);
    for (int64_t row = 0; row < job.rows; ++row) {
      std::memcpy(padded.get() + row * depth, job.x + row * job.ldx, k * sizeof(bf16));
      std::memset(padded.get() + row * depth + k, 0, (depth - k) * sizeof(bf16));
    }
    job.x = padded.get();
    job.ldx = depth;
  }
  parallel_tasks(threads, job.tasks(), [&] { return Worker<Epilogue>(job, epilogue); });
}

}  // namespace
}  // namespace chairlift

using namespace chairlift;


// weight [n, k] with row stride ld -> panels at slots first_slot, first_slot + slot_stride, ...
CHAIRLIFT_EXPORT void chairlift_pack(const bf16* weight, int64_t n, int64_t k, int64_t ld, bf16* packed,
                                     int64_t first_slot, int64_t slot_stride, int threads) {
  parallel_ranges(threads, ceil_div(n, kLanes), 1, [&](int64_t panel, int64_t) {
    bf16* to = panel_at(packed, first_slot + panel * slot_stride, ceil_div(k, kStep));
    pack_panel(weight + panel * kLanes * ld, n - panel * kLanes, k, ld, to);
  });
}

CHAIRLIFT_EXPORT void chairlift_linear(const bf16* x, int64_t ldx, int64_t rows, int64_t k, const bf16* packed,
                                       int64_t n, const float* bias, const bf16* residual, void* out,
                                       int out_is_float, const NextWeights* next, int threads) {
  const Job job{x, ldx, rows, packed, ceil_div(k, kStep), ceil_div(n, kPair), n, next, threads};
  if (out_is_float)
    run(job, k, threads, PlainEpilogue<float>{bias, residual, static_cast<float*>(out), n});
  else
    run(job, k, threads, PlainEpilogue<bf16>{bias, residual, static_cast<bf16*>(out), n});
}

CHAIRLIFT_EXPORT void chairlift_gate_up(const bf16* x, int64_t ldx, int64_t rows, int64_t k, const bf16* packed,
                                        int64_t inner, int activation, bf16* out, int64_t ldo,
                                        const NextWeights* next, int threads) {
  const Job job{x, ldx, rows, packed, ceil_div(k, kStep), ceil_div(inner, kLanes), inner, next, threads};
  run(job, k, threads, GatedEpilogue{static_cast<Activation>(activation), out, ldo, inner});
}
