// Rotary position embedding of the last rope_dim values of a vector, in pairs (x[2i], x[2i+1]) ->
// (a c - b s, a s + b c); the inverse takes -s. FP32 inside, one rounding.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/model_config.h"
#include "device/device.h"
#include "kernels/activation.h"

namespace fathom::kernels {

// f_i, i < rope_dim / 2: plain of rope_theta for window layers and drafts; of compress_rope_theta
// with YaRN for compressed layers.
std::vector<float> RopeFrequencies(const config::ModelConfig& config, config::LayerKind kind);

// out[2i], out[2i+1] = cosine and sine of fl32(position * f_i).
void RopeAngles(int64_t position, std::span<const float> frequencies, float* out);

// Rotates rope_dim values in FP32; not rounded.
void RotateRow(float* values, const float* angles, int rope_dim, bool inverse);

struct RopeAnglesParams {
  const int32_t* positions = nullptr;  // [num_tokens]
  int64_t num_tokens = 0;
  std::span<const float> frequencies;  // [rope_dim / 2]
  float* angles = nullptr;             // [num_tokens, rope_dim]
};

template <typename T>
struct RopeParams {
  T* x = nullptr;  // [num_tokens, num_heads, head_dim], in place
  int64_t num_tokens = 0;
  int num_heads = 1;
  int head_dim = 0;
  int rope_dim = 0;
  const float* angles = nullptr;  // [num_tokens, rope_dim]
  bool inverse = false;
};

void Launch(const RopeAnglesParams& params, device::Stream& stream);
template <typename T>
void Launch(const RopeParams<T>& params, device::Stream& stream);

}  // namespace fathom::kernels
