// The matrix kernel on AMX tiles: up to 32 rows x 32 columns in four accumulators. Included by matmul.h.
#pragma once

namespace chairlift {

// A macro because GCC takes a tile's number as a literal only.
#define LOAD_ROWS(tile, past_l1, from, stride) \
  do {                                         \
    if constexpr (past_l1)                     \
      _tile_stream_loadd(tile, from, stride);  \
    else                                       \
      _tile_loadd(tile, from, stride);         \
  } while (false)

// Tiles 0-3 are sums (row half, panel), 4-5 the row halves of a, 6-7 the panels.
class AmxMatmul {
 public:
  static constexpr int kMaxRows = 32;
  static constexpr bool kHasOwnUnit = true;  // vector registers and their unit are free meanwhile

  AmxMatmul() = default;
  AmxMatmul(const AmxMatmul&) = delete;
  AmxMatmul& operator=(const AmxMatmul&) = delete;
  ~AmxMatmul() {
    if (rows_) _tile_release();
  }

  template <Rows kRows, class Panels, class Ahead>
  void run(const bf16* a, int64_t lda, int rows, const Panels& b, int steps, float* c,
           int64_t ldc, bool accumulate, Ahead& ahead) {
    configure(rows);
    if (rows > 16)
      multiply<kRows, true>(a, lda, b, steps, c, ldc, accumulate, ahead);
    else
      multiply<kRows, false>(a, lda, b, steps, c, ldc, accumulate, ahead);
  }

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  int rows_ = 0;

  // Loading shapes takes as long as a dozen tile products, so shapes that also fit are kept.
  void configure(int rows) {
    if (rows == rows_ || (rows == 16 && rows_ > 16)) return;
    rows_ = rows;
    const uint8_t upper = static_cast<uint8_t>(rows < 16 ? rows : 16);
    const uint8_t lower = static_cast<uint8_t>(rows > 16 ? rows - 16 : 1);
    Shapes shapes;
    const uint8_t tile_rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int tile = 0; tile < 8; ++tile) {
      shapes.rows[tile] = tile_rows[tile];
      shapes.row_bytes[tile] = 64;
    }
    // GCC 12 gives _tile_loadconfig an operand of 8 bytes and drops the stores to the other 56.
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }

  template <Rows kRows, bool kTwoHalves, class Panels, class Ahead>
  static void multiply(const bf16* a, int64_t lda, const Panels& b, int steps, float* c,
                       int64_t ldc, bool accumulate, Ahead& ahead) {
    const int64_t a_bytes = lda * 2, c_bytes = ldc * 4;
    const bf16* a_lower = a + 16 * lda;
    float* c_lower = c + 16 * ldc;
    if (accumulate) {
      _tile_loadd(0, c, c_bytes);
      _tile_loadd(1, c + kLanes, c_bytes);
      if constexpr (kTwoHalves) {
        _tile_loadd(2, c_lower, c_bytes);
        _tile_loadd(3, c_lower + kLanes, c_bytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (kTwoHalves) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    constexpr bool kPass = kRows == Rows::kPassing;
    for (int step = 0; step < steps; ++step) {
      ahead.fetch();
      _tile_loadd(6, b.first(step), 64);
      LOAD_ROWS(4, kPass, a + step * kStep, a_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b.second(step), 64);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTwoHalves) {
        LOAD_ROWS(5, kPass, a_lower + step * kStep, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + kLanes, c_bytes);
    if constexpr (kTwoHalves) {
      _tile_stored(2, c_lower, c_bytes);
      _tile_stored(3, c_lower + kLanes, c_bytes);
    }
  }
};

#undef LOAD_ROWS

template <>
struct MatmulFor<bf16> {
  using type = AmxMatmul;
};

}  // namespace chairlift
