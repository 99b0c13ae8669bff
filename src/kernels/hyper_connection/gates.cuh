// From mixes to gates, on the device: what the kernels of hyper_connection_cuda.h share. Device
// code only.
#pragma once

#include "kernels/hyper_connection/hyper_connection.h"

namespace fathom::kernels {

// 1 / x of a positive normal number, to its last bit or one beside it; IEEE division takes a call.
__device__ __forceinline__ float Reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r * (2.0f - x * r);
}

__device__ __forceinline__ float InverseSqrt(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r * (1.5f - 0.5f * x * r * r);
}

__device__ __forceinline__ float Sigmoid(float x) { return Reciprocal(1.0f + expf(-x)); }

// Softmax over k, then Sinkhorn, of the logits L[j][k]; row j on lane j of every four.
__device__ __forceinline__ float4 Sinkhorn(float4 c, const HyperConnectionConstants& constants) {
  const float eps = constants.hc_eps;
  const auto scale_row = [&c](float scale) {
    c = {scale * c.x, scale * c.y, scale * c.z, scale * c.w};
  };
  const auto over_rows = [](float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  };
  const auto scale_columns = [&] {
    c = {c.x * Reciprocal(over_rows(c.x) + eps), c.y * Reciprocal(over_rows(c.y) + eps),
         c.z * Reciprocal(over_rows(c.z) + eps), c.w * Reciprocal(over_rows(c.w) + eps)};
  };
  const float max = fmaxf(fmaxf(c.x, c.y), fmaxf(c.z, c.w));
  c = {expf(c.x - max), expf(c.y - max), expf(c.z - max), expf(c.w - max)};
  scale_row(Reciprocal((c.x + c.y) + (c.z + c.w)));
  c = {c.x + eps, c.y + eps, c.z + eps, c.w + eps};
  scale_columns();
#pragma unroll 1
  for (int i = 1; i < constants.sinkhorn_iters; ++i) {
    scale_row(Reciprocal((c.x + c.y) + (c.z + c.w) + eps));
    scale_columns();
  }
  return c;
}

}  // namespace fathom::kernels
