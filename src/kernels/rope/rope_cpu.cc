#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/rope/rope.h"

namespace fathom::kernels {
namespace {

// The pair whose wavelength makes `rotations` turns over the original context.
double CorrectionDim(double rotations, const config::ModelConfig& c) {
  const double original = c.yarn.original_max_position_embeddings;
  return c.rope_dim * std::log(original / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(c.compress_rope_theta));
}

}  // namespace

std::vector<float> RopeFrequencies(const config::ModelConfig& c, config::LayerKind kind) {
  const bool compressed = kind != config::LayerKind::kWindow;
  const double base = compressed ? c.compress_rope_theta : c.rope_theta;
  std::vector<float> frequencies(static_cast<size_t>(c.rope_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(c.rope_dim);
    frequencies[i] = 1.0f / static_cast<float>(std::pow(base, static_cast<double>(exponent)));
  }
  if (!compressed) return frequencies;
  const double low = std::max(std::floor(CorrectionDim(c.yarn.beta_fast, c)), 0.0);
  double high = std::min(std::ceil(CorrectionDim(c.yarn.beta_slow, c)), c.rope_dim - 1.0);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float ramp =
        static_cast<float>((static_cast<double>(i) - low)) / static_cast<float>(high - low);
    const float g = std::clamp(ramp, 0.0f, 1.0f);
    const float f = frequencies[i];
    frequencies[i] = f / static_cast<float>(c.yarn.factor) * g + f * (1.0f - g);
  }
  return frequencies;
}

void RopeAngles(int64_t position, std::span<const float> frequencies, float* out) {
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double angle = static_cast<float>(position) * frequencies[i];
    out[2 * i] = static_cast<float>(std::cos(angle));
    out[2 * i + 1] = static_cast<float>(std::sin(angle));
  }
}

void RotateRow(float* values, const float* angles, int rope_dim, bool inverse) {
  for (int i = 0; i < rope_dim; i += 2) {
    const float a = values[i], b = values[i + 1];
    const float c = angles[i], s = inverse ? -angles[i + 1] : angles[i + 1];
    values[i] = a * c - b * s;
    values[i + 1] = a * s + b * c;
  }
}

void Launch(const RopeAnglesParams& p, device::Stream& stream) {
  const auto rope_dim = static_cast<int64_t>(p.frequencies.size()) * 2;
  stream.thread_pool().ParallelFor(p.num_tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      RopeAngles(p.positions[t], p.frequencies, p.angles + t * rope_dim);
    }
  });
}

template <typename T>
void Launch(const RopeParams<T>& p, device::Stream& stream) {
  const int64_t grain = std::max(1, 256 / p.num_heads);
  stream.thread_pool().ParallelFor(p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    float values[256];
    CHECK_LE(p.rope_dim, 256);
    for (int64_t row = begin * p.num_heads; row < end * p.num_heads; ++row) {
      T* x = p.x + (row + 1) * p.head_dim - p.rope_dim;
      for (int i = 0; i < p.rope_dim; ++i) values[i] = ToFloat(x[i]);
      RotateRow(values, p.angles + row / p.num_heads * p.rope_dim, p.rope_dim, p.inverse);
      for (int i = 0; i < p.rope_dim; ++i) x[i] = FromFloat<T>(values[i]);
    }
  });
}

template void Launch(const RopeParams<BFloat16>&, device::Stream&);
template void Launch(const RopeParams<float>&, device::Stream&);

}  // namespace fathom::kernels
