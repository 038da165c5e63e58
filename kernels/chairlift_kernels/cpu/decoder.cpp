// A stack of Llama-shaped decoder layers in one call: the interpreter, which takes 5 us to start an operator and
// hands its lock to a busy neighbour each time, is asked once per step and not seven times per layer.
#include <cstdint>

#include "linear.h"
#include "matmul.h"

using chairlift::bf16;
using chairlift::ceil_div;
using chairlift::NextWeights;

// The operators of attention.cpp and elementwise.cpp, as they are exported.
extern "C" {
void chairlift_attend(const void*, int64_t, int64_t, void*, int64_t, int64_t, void*, int64_t, int64_t, int64_t, int64_t,
                      const int32_t*, int64_t, const int32_t*, const int32_t*, int64_t, int64_t, float, int64_t, float,
                      const float*, int, int);
void chairlift_rms_norm(const void*, void*, const void*, void*, int64_t, int64_t, int64_t, float, int, int, int);
void chairlift_rope_and_cache(const void*, int64_t, const void*, const void*, int64_t, int, void*, int64_t, int64_t,
                              int64_t, int64_t, const int64_t*, void*, int64_t, int64_t, const void*, const void*, float,
                              int, int, int);
}

namespace {

// decoder.py declares the same three structures; every field is 8 bytes wide.
struct Layer {
  const bf16 *attention_norm, *mlp_norm, *qkv, *out, *gate_up, *down, *q_norm, *k_norm;
  const float *qkv_bias, *out_bias, *down_bias, *sinks;
  void* cache;
  int64_t window;
  double scale, softcap;
};

struct Shape {
  int64_t hidden, heads, kv_heads, key_dim, value_dim, inner, block_size, activation, unit_offset;
  double eps, head_eps;
};

struct Batch {
  bf16* hidden;  // [tokens, hidden], the residual stream: changed in place
  const void *cos, *sin;
  const int64_t* slots;
  const int32_t *tables, *starts, *lengths;
  bf16 *normed, *qkv, *query, *attended, *middle, *gated;  // scratch of one layer
  int64_t tokens, rows, table_width, angles, angles_are_float;
  int64_t normed_stride, attended_stride, gated_stride;  // of a row, for what is read by matrix products
};

void run_layer(const Layer& layer, const Layer* next_layer, const Shape& s, const Batch& b, int threads) {
  const int64_t qkv_width = (s.heads + s.kv_heads) * s.key_dim + s.kv_heads * s.value_dim;
  const int64_t out_width = s.heads * s.value_dim;
  const NextWeights out{layer.out, out_width, ceil_div(s.hidden, chairlift::kPair)};
  const NextWeights gate_up{layer.gate_up, s.hidden, ceil_div(s.inner, chairlift::kLanes)};
  const NextWeights down{layer.down, s.inner, ceil_div(s.hidden, chairlift::kPair)};
  const NextWeights qkv{next_layer ? next_layer->qkv : nullptr, s.hidden, ceil_div(qkv_width, chairlift::kPair)};
  const int offset = static_cast<int>(s.unit_offset);
  chairlift_rms_norm(b.hidden, nullptr, layer.attention_norm, b.normed, b.normed_stride, b.tokens, s.hidden,
                     s.eps, offset, 0, threads);
  chairlift_linear(b.normed, b.normed_stride, b.tokens, s.hidden, layer.qkv, qkv_width, layer.qkv_bias, nullptr, b.qkv,
                   0, &out, threads);
  chairlift_rope_and_cache(b.qkv, qkv_width, b.cos, b.sin, b.angles, static_cast<int>(b.angles_are_float), layer.cache,
                           s.kv_heads, s.key_dim, s.value_dim, s.block_size, b.slots, b.query, b.tokens, s.heads,
                           layer.q_norm, layer.k_norm, s.head_eps, offset, 0, threads);
  chairlift_attend(b.query, s.heads * s.key_dim, s.key_dim, b.attended, b.attended_stride, s.value_dim, layer.cache,
                   s.kv_heads, s.key_dim, s.value_dim, s.block_size,
                   b.tables, b.table_width, b.starts, b.lengths, b.rows,
                   s.heads, layer.scale, layer.window, layer.softcap, layer.sinks, 0, threads);
  // A linear layer may compute some rows twice, so it can't add to its output in place.
  chairlift_linear(b.attended, b.attended_stride, b.tokens, out_width, layer.out, s.hidden, layer.out_bias, b.hidden,
                   b.middle, 0, &gate_up, threads);
  chairlift_rms_norm(b.middle, nullptr, layer.mlp_norm, b.normed, b.normed_stride, b.tokens, s.hidden, s.eps,
                     offset, 0, threads);
  chairlift_gate_up(b.normed, b.normed_stride, b.tokens, s.hidden, layer.gate_up, s.inner,
                    static_cast<int>(s.activation), b.gated, b.gated_stride, &down, threads);
  chairlift_linear(b.gated, b.gated_stride, b.tokens, s.inner, layer.down, s.hidden, layer.down_bias, b.middle,
                   b.hidden, 0, next_layer ? &qkv : nullptr, threads);
}

}  // namespace

CHAIRLIFT_EXPORT void chairlift_decoder(const Layer* layers, int64_t count, const Shape* shape, const Batch* batch,
                                        int threads) {
  for (int64_t i = 0; i < count; ++i)
    run_layer(layers[i], i + 1 < count ? &layers[i + 1] : nullptr, *shape, *batch, threads);
}
