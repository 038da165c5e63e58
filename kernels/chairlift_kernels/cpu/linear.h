// The linear layers of linear.cpp, as they are exported.
#pragma once

#include <cstdint>

#include "vector.h"

namespace chairlift {

// Packed weights that are read next: a layer's last tasks fetch the pairs with which the following one begins.
struct NextWeights {
  const bf16* packed;
  int64_t k, pairs;
};

}  // namespace chairlift

// x [rows, k] (row stride ldx), out [rows, n] contiguous bf16 or fp32, residual [rows, n] or null; out must not
// be the residual: some rows may be computed twice. next may be null.
extern "C" void chairlift_linear(const chairlift::bf16* x, int64_t ldx, int64_t rows, int64_t k,
                                 const chairlift::bf16* packed, int64_t n, const float* bias,
                                 const chairlift::bf16* residual, void* out, int out_is_float,
                                 const chairlift::NextWeights* next, int threads);

// x [rows, k], packed gate and up [inner, k] -> out [rows, inner] (row stride ldo).
extern "C" void chairlift_gate_up(const chairlift::bf16* x, int64_t ldx, int64_t rows, int64_t k,
                                  const chairlift::bf16* packed, int64_t inner, int activation, chairlift::bf16* out,
                                  int64_t ldo, const chairlift::NextWeights* next, int threads);
