#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/compressor/pooling.h"
#include "kernels/simd/simd.h"

namespace fathom::kernels {

void PoolSoftmax(const PoolRow* rows, int num_rows, int dim, float* out) {
  float max[kMaxEntrySize], sum[kMaxEntrySize], p[kMaxEntrySize];
  std::copy(rows[0].z, rows[0].z + dim, max);
  for (int r = 1; r < num_rows; ++r) {
    for (int i = 0; i < dim; ++i) max[i] = std::max(max[i], rows[r].z[i]);
  }
  std::fill(sum, sum + dim, 0.0f);
  std::fill(out, out + dim, 0.0f);
  for (int r = 0; r < num_rows; ++r) {
    for (int i = 0; i < dim; ++i) p[i] = rows[r].z[i] - max[i];
    Simd().exp(p, p, dim);
    for (int i = 0; i < dim; ++i) {
      sum[i] = sum[i] + p[i];
      out[i] = out[i] + p[i] * rows[r].c[i];
    }
  }
  for (int i = 0; i < dim; ++i) out[i] = out[i] / sum[i];
}

void OnlineSoftmax::Clear(int dim) {
  std::fill(m, m + dim, -std::numeric_limits<float>::infinity());
  std::fill(l, l + dim, 0.0f);
  std::fill(acc, acc + dim, 0.0f);
}

void OnlineSoftmax::Merge(const PoolRow& row, int dim) {
  // One of a channel's two exponentials is exp(0) = 1.
  float e[kMaxEntrySize];
  for (int i = 0; i < dim; ++i) e[i] = -std::fabs(row.z[i] - m[i]);
  Simd().exp(e, e, dim);
  for (int i = 0; i < dim; ++i) {
    const float z = row.z[i];
    const float old_scale = z > m[i] ? e[i] : 1.0f;
    const float new_scale = z > m[i] ? 1.0f : e[i];
    m[i] = std::max(m[i], z);
    l[i] = l[i] * old_scale + new_scale;
    acc[i] = acc[i] * old_scale + new_scale * row.c[i];
  }
}

}  // namespace fathom::kernels
