#include <algorithm>
#include <cmath>

#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/lane_sum.h"
#include "kernels/norm/norm.h"
#include "kernels/simd/convert_rows.h"

namespace fathom::kernels {
namespace {

constexpr int kS = kNumStreams;

void Sigmoid(float* x, int size) {
  for (int i = 0; i < size; ++i) x[i] = -x[i];
  Simd().exp(x, x, size);
  for (int i = 0; i < size; ++i) x[i] = 1.0f / (1.0f + x[i]);
}

// rsqrt(mean(flat(x)^2) + eps).
template <typename T>
float InverseRms(const T* x, int64_t size, float eps) {
  return 1.0f / std::sqrt(MeanSquare(x, size) + eps);
}

void DivideRows(float (&c)[kS][kS], float eps) {
  for (auto& row : c) {
    const float sum = row[0] + row[1] + row[2] + row[3] + eps;
    for (float& v : row) v = v / sum;
  }
}

void DivideColumns(float (&c)[kS][kS], float eps) {
  for (int k = 0; k < kS; ++k) {
    const float sum = c[0][k] + c[1][k] + c[2][k] + c[3][k] + eps;
    for (int j = 0; j < kS; ++j) c[j][k] = c[j][k] / sum;
  }
}

void Sinkhorn(float (&c)[kS][kS], const HyperConnectionConstants& constants) {
  for (auto& row : c) {
    const float max = std::max({row[0], row[1], row[2], row[3]});
    for (float& v : row) v = v - max;
  }
  Simd().exp(&c[0][0], &c[0][0], kS * kS);
  for (auto& row : c) {
    const float sum = row[0] + row[1] + row[2] + row[3];
    for (float& v : row) v = v / sum + constants.hc_eps;
  }
  DivideColumns(c, constants.hc_eps);
  for (int i = 1; i < constants.sinkhorn_iters; ++i) {
    DivideRows(c, constants.hc_eps);
    DivideColumns(c, constants.hc_eps);
  }
}

// y = b(sum_i pre_i x_i).
template <typename T>
void MixStreams(const T* x, const float* pre, int64_t hidden, T* y) {
  float in[kRowPiece], sum[kRowPiece];
  for (int64_t begin = 0; begin < hidden; begin += kRowPiece) {
    const int64_t n = std::min(kRowPiece, hidden - begin);
    for (int s = 0; s < kS; ++s) {
      WidenRow(x + s * hidden + begin, in, n);
      for (int64_t i = 0; i < n; ++i) sum[i] = s == 0 ? pre[0] * in[i] : sum[i] + pre[s] * in[i];
    }
    NarrowRow(sum, y + begin, n);
  }
}

template <typename T>
void PreToken(const HyperConnectionPreParams<T>& p, int64_t t) {
  const T* x = p.streams + t * kS * p.hidden;
  const float inverse_rms = InverseRms(x, kS * p.hidden, p.constants.norm_eps);
  const float* raw = p.mixes + t * kNumMixes;
  const auto mix = [&](int i, int part) {
    return raw[i] * inverse_rms * p.scale[part] + p.base[i];
  };
  float pre[kS], comb[kS][kS];
  float* post = p.post + t * kS;
  for (int i = 0; i < kS; ++i) {
    pre[i] = mix(i, 0);
    post[i] = mix(kS + i, 1);
  }
  Sigmoid(pre, kS);
  Sigmoid(post, kS);
  for (int i = 0; i < kS; ++i) {
    pre[i] = pre[i] + p.constants.hc_eps;
    post[i] = 2.0f * post[i];
  }
  for (int j = 0; j < kS; ++j) {
    for (int k = 0; k < kS; ++k) comb[j][k] = mix(2 * kS + kS * j + k, 2);
  }
  Sinkhorn(comb, p.constants);
  std::copy(&comb[0][0], &comb[0][0] + kS * kS, p.comb + t * kS * kS);
  T* y = p.y + t * p.hidden;
  MixStreams(x, pre, p.hidden, y);
  RmsNormRow(y, p.norm_weight, p.constants.norm_eps, p.hidden, y);
}

template <typename T>
void PostToken(const HyperConnectionPostParams<T>& p, int64_t t) {
  T* x = p.streams + t * kS * p.hidden;
  const T* y = p.y + t * p.hidden;
  const float* post = p.post + t * kS;
  const float* comb = p.comb + t * kS * kS;
  float in[kS][kRowPiece], y_in[kRowPiece], out[kRowPiece];
  for (int64_t begin = 0; begin < p.hidden; begin += kRowPiece) {
    const int64_t n = std::min(kRowPiece, p.hidden - begin);
    for (int j = 0; j < kS; ++j) WidenRow(x + j * p.hidden + begin, in[j], n);
    WidenRow(y + begin, y_in, n);
    for (int k = 0; k < kS; ++k) {
      for (int64_t i = 0; i < n; ++i) {
        float mixed = comb[k] * in[0][i];
        for (int j = 1; j < kS; ++j) mixed = mixed + comb[j * kS + k] * in[j][i];
        out[i] = post[k] * y_in[i] + mixed;
      }
      NarrowRow(out, x + k * p.hidden + begin, n);
    }
  }
}

template <typename T>
void HeadToken(const HyperConnectionHeadParams<T>& p, int64_t t) {
  const T* x = p.streams + t * kS * p.hidden;
  const float inverse_rms = InverseRms(x, kS * p.hidden, p.constants.norm_eps);
  float pre[kS];
  for (int i = 0; i < kS; ++i) {
    pre[i] = p.mixes[t * kS + i] * inverse_rms * p.scale[0] + p.base[i];
  }
  Sigmoid(pre, kS);
  for (float& v : pre) v = v + p.constants.hc_eps;
  MixStreams(x, pre, p.hidden, p.y + t * p.hidden);
}

int64_t TokensPerTask(int64_t hidden) { return std::max<int64_t>(1, (1 << 12) / hidden); }

}  // namespace

template <typename T>
void Launch(const HyperConnectionPreParams<T>& p, device::Stream& stream) {
  stream.thread_pool().ParallelFor(p.num_tokens, TokensPerTask(p.hidden),
                                   [&](int64_t begin, int64_t end) {
                                     for (int64_t t = begin; t < end; ++t) PreToken(p, t);
                                   });
}

template <typename T>
void Launch(const HyperConnectionPostParams<T>& p, device::Stream& stream) {
  stream.thread_pool().ParallelFor(p.num_tokens, TokensPerTask(p.hidden),
                                   [&](int64_t begin, int64_t end) {
                                     for (int64_t t = begin; t < end; ++t) PostToken(p, t);
                                   });
}

template <typename T>
void Launch(const HyperConnectionHeadParams<T>& p, device::Stream& stream) {
  stream.thread_pool().ParallelFor(p.num_tokens, TokensPerTask(p.hidden),
                                   [&](int64_t begin, int64_t end) {
                                     for (int64_t t = begin; t < end; ++t) HeadToken(p, t);
                                   });
}

template void Launch(const HyperConnectionPreParams<BFloat16>&, device::Stream&);
template void Launch(const HyperConnectionPreParams<float>&, device::Stream&);
template void Launch(const HyperConnectionPostParams<BFloat16>&, device::Stream&);
template void Launch(const HyperConnectionPostParams<float>&, device::Stream&);
template void Launch(const HyperConnectionHeadParams<BFloat16>&, device::Stream&);
template void Launch(const HyperConnectionHeadParams<float>&, device::Stream&);

}  // namespace fathom::kernels
